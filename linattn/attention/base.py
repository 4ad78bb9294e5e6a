"""The interface of an inner attention, a module from queries, keys and values, with heads already split, to outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.feature_maps.base import FeatureMap
from linattn.ops.state import checked_kind


class InnerAttention(nn.Module, ABC):
    """Attends with split heads. With fewer key heads than query heads, each serves a group of consecutive query heads,
    as in `scaled_dot_product_attention(enable_gqa=True)`."""

    causal: bool

    @abstractmethod
    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> Float[Tensor, "b h n dv"]: ...

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: Any = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], Any]:
        """Attend from the next tokens, any number of them. `state` holds the past; None means that there is none."""
        raise NotImplementedError(f"{type(self).__name__} is not causal here, so it cannot be extended token by token")

    def summarize(
        self,
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> Any:
        """Return what `read` needs to know about the keys and values, for example about an encoder's output.

        `read(q, summarize(k, v))` is `forward(q, k, v)`. This class keeps the keys and values themselves; attentions
        with a smaller summary override both methods."""
        self.check_not_causal()
        return KeysAndValues(k, v, None if key_mask is None else key_mask.expand(k.shape[0], -1, -1))

    def read(self, q: Float[Tensor, "b h n d"], summary: Any) -> Float[Tensor, "b h n dv"]:
        """Attend from any number of queries to summarized keys and values."""
        summary = checked_kind(summary, KeysAndValues)
        return self(q, summary.k, summary.v, key_mask=summary.key_mask)

    def check_not_causal(self) -> None:
        if self.causal:
            raise ValueError(
                f"{type(self).__name__} is causal here, so each query sees different keys, which no summary can hold: "
                "call extend"
            )


def checked_inner(inner: object) -> InnerAttention:
    """Raise ValueError for a name, a feature map, or anything else in the place of an inner attention."""
    if isinstance(inner, InnerAttention):
        return inner
    if isinstance(inner, str):
        hint = f"the name {inner!r}: linattn.named_attention({inner!r}, num_heads=…, head_dim=…) makes one"
    elif isinstance(inner, FeatureMap):
        hint = f"a {type(inner).__name__}: linattn.LinearAttention(feature_map) makes one"
    else:
        hint = f"a {type(inner).__name__}"
    raise ValueError(f"an InnerAttention is needed here, but this is {hint}")


class KeysAndValues(NamedTuple):
    """The summary for attentions that need every key and value."""

    k: Float[Tensor, "b hk m d"]
    v: Float[Tensor, "b hk m dv"]
    key_mask: Bool[Tensor, " b #hk m"] | None


def group_queries(q: Float[Tensor, "b h n d"], num_key_heads: int) -> Float[Tensor, "b hk g n d"]:
    """Group consecutive query heads that share a key head. Keys broadcast against the groups after `unsqueeze(2)`."""
    if q.shape[1] % num_key_heads:
        raise ValueError(
            f"the number of key heads must divide that of query heads, but there are {num_key_heads} and {q.shape[1]}"
        )
    return q.unflatten(1, (num_key_heads, -1))


def map_state(function: Callable[[Any], Any], state: Any, *, leaf: type = Tensor) -> Any:
    """Apply the function to every tensor of a state: nested tuples of tensors, each with the batch in front.

    With a kind of state as `leaf`, apply it to the instances of that kind instead; other tensors stay."""
    if isinstance(state, leaf):
        return function(state)
    if isinstance(state, tuple):
        parts = [map_state(function, part, leaf=leaf) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state
