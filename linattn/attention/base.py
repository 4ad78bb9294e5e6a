"""The interface of an inner attention, a module from queries, keys and values, with heads already split, to outputs."""

from abc import ABC
from copy import copy
from types import NoneType
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.attention.checks import check_keys, checked_heads
from linattn.attention.gates import AnyGates, AnyNeeds, checked_gates
from linattn.feature_maps.base import FeatureMap
from linattn.ops.nested import checked_kind
from linattn.types import KeyMask, Keys, Outputs, Queries, Values

# attributes that follow from the options
_NO_OPTIONS = ("training", "scales_products")


class InnerAttention(nn.Module, ABC):
    """Attends with split heads. With fewer key heads than query heads, each key head serves a group of consecutive
    query heads, as in `scaled_dot_product_attention(enable_gqa=True)`. `key_mask` is True for present keys; None means
    all. `gates` are numbers per token, such as decays, for attentions whose `needs` is not None.

    The public methods check their arguments, and call the methods that a subclass defines: `_extend`, with the class of
    its state in `state_kind`, if it can be causal; `_summarize` and `read` if a summary can be smaller than the keys
    and values. A subclass defines `_attend` if it has no such summary, or a faster way to attend. If `needs` is not
    None, the gates are the last argument of `_extend`; otherwise it is called without them."""

    causal: bool
    state_kind: type = tuple
    """The class of the causal state."""
    needs: AnyNeeds = None
    """The gates that calls must pass. None: no gates."""
    scales_products: bool = False
    """If True, similarities are functions of q·k/√d, or estimate one, so that another scale of q·k is a factor of q."""
    same_tokens: bool = False
    """If True, queries and keys must be those of the same tokens, also where the attention is not causal."""

    def forward(self, q: Queries, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None) -> Outputs:
        q, k, v, _ = checked_heads(q, k, v, key_mask, same_tokens=self.causal or self.same_tokens)
        own = self._checked_gates(gates, k)
        return self._extend(q, k, v, None, key_mask, *own)[0] if own else self._attend(q, k, v, key_mask)

    def extend(
        self, q: Queries, k: Keys, v: Values, state: Any = None, *, key_mask: KeyMask = None, gates: AnyGates = None
    ) -> tuple[Outputs, Any]:
        """Attend from the next tokens, any number of them, and return the outputs and the next state. `state` holds the
        earlier tokens; None means that there are none."""
        if not self.causal:
            raise NotImplementedError(
                f"{type(self).__name__} is not causal here, so it cannot be extended token by token"
            )
        state = None if state is None else self._checked_state(state)
        q, k, v, state = checked_heads(q, k, v, key_mask, state, same_tokens=True)
        return self._extend(q, k, v, state, key_mask, *self._checked_gates(gates, k))

    def summarize(self, k: Keys, v: Values, *, key_mask: KeyMask = None) -> Any:
        """Return a summary of the keys and values, for example of an encoder's output, for any number of calls of
        `read`: `read(q, summarize(k, v))` is `forward(q, k, v)`."""
        if self.causal:
            raise ValueError(
                f"{type(self).__name__} is causal here, so each query sees different keys, which no summary can hold: "
                "call extend"
            )
        check_keys(k, v, key_mask)
        return self._summarize(k, v, key_mask)

    def read(self, q: Queries, summary: Any) -> Outputs:
        """Attend from any number of queries to summarized keys and values."""
        k, v, key_mask = checked_kind(summary, KeysAndValues)
        return self(q, k, v, key_mask=key_mask)

    def as_causal(self) -> "InnerAttention | None":
        """Return the same attention over j ≤ i, a view that shares the weights: register, move and save only the
        original. None means that there is no causal form, as for Linformer."""
        if self.causal or type(self)._extend is InnerAttention._extend:
            return self if self.causal else None
        # not named_children, which leaves out the second name of a part
        parts = self._modules.items()
        inside = {name: part.as_causal() for name, part in parts if isinstance(part, InnerAttention)}
        view = copy(self)
        view.causal, view._modules = True, self._modules | inside
        return None if None in inside.values() else view

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        if self.causal:
            return self._extend(q, k, v, None, key_mask)[0]
        return self.read(q, self._summarize(k, v, key_mask)).to(v.dtype)

    def _extend(self, q: Queries, k: Keys, v: Values, state: Any, key_mask: KeyMask) -> tuple[Outputs, Any]:
        raise NotImplementedError

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> Any:
        return KeysAndValues(k, v, None if key_mask is None else key_mask.expand(k.shape[0], -1, -1))

    def _checked_state(self, state: Any) -> Any:
        return checked_kind(state, self.state_kind)

    def _checked_gates(self, gates: Any, k: Tensor) -> tuple[Any, ...]:
        return checked_gates(self, gates, k)

    def extra_repr(self) -> str:
        """Show every option that is a number, a name, a tuple or None."""
        options = {name: x for name, x in vars(self).items() if name[0] != "_" and name not in _NO_OPTIONS}
        return ", ".join(
            f"{name}={x!r}" for name, x in options.items() if isinstance(x, (int, float, str, tuple, NoneType))
        )


class KeysAndValues(NamedTuple):
    """Keys and values: the summary or the causal state of attentions that cannot sum them up, such as softmax."""

    k: Keys
    v: Values
    key_mask: Bool[Tensor, " b #hk m"] | None = None


def checked_ungated(inner: InnerAttention, where: str) -> InnerAttention:
    """Return `inner`. Raise ValueError if it needs gates; `where` is the name of the caller, which makes no gates."""
    if inner.needs is not None:
        raise ValueError(
            f"{where} makes no gates, but {type(inner).__name__} needs some: MultiheadAttention makes them"
        )
    return inner


def checked_inner(inner: object) -> InnerAttention:
    """Return `inner`. Raise ValueError if it is a name, a feature map, or anything else but an inner attention."""
    if isinstance(inner, InnerAttention):
        return inner
    if isinstance(inner, str):
        hint = f"the name {inner!r}: linattn.named_attention({inner!r}, num_heads=…, head_dim=…) makes one"
    elif isinstance(inner, FeatureMap):
        hint = f"a {type(inner).__name__}: linattn.LinearAttention(feature_map) makes one"
    elif isinstance(inner, type):
        hint = f"the class {inner.__name__}: call it to make one"
    else:
        hint = f"a {type(inner).__name__}"
    raise ValueError(f"an InnerAttention is needed here, but this is {hint}")


def group_queries(q: Queries, num_key_heads: int) -> Float[Tensor, "b hk g n d"]:
    """Return queries (b h n d) as (b hk g n d), so that the g consecutive query heads of a key head form one group."""
    if q.shape[1] % num_key_heads:
        raise ValueError(
            f"the number of key heads must divide that of query heads, but there are {num_key_heads} and {q.shape[1]}"
        )
    return q.unflatten(1, (num_key_heads, -1))


def group_mask(key_mask: KeyMask) -> Bool[Tensor, "#b #hk 1 m"] | None:
    """Return a key mask (b hk m) as (b hk 1 m), with a dimension for the groups of query heads."""
    return None if key_mask is None else key_mask.unsqueeze(2)
