"""The layer of transformers' DynamicCache for a stock model that attends by our methods."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from linattn.attention import InnerAttention
from linattn.attention.gates import AnyGates
from linattn.integrations.transformers.state_layer import StateLayer
from linattn.types import KeyMask, Outputs, Queries, Values

ATTENTION_LAYER = "linattn"
"""The name by which transformers' DynamicCache finds our layer."""


@dataclass(frozen=True)
class CachedKeys:
    """The `new` keys and the cache `layer` with the past. A model passes this object from the cache to the attention
    function, where it would pass all keys.

    What a model computes from it is computed from the new keys and keeps the layer: some models cache a latent, and
    expand the keys of all heads from it. It is no subclass of Tensor, which torch.compile could not unwrap."""

    new: Tensor
    layer: "AttentionLayer"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.new, name)
        if not callable(value):
            return _join(value, self.layer)
        return lambda *args, **options: self._call(value, args, options)

    def __getitem__(self, index: Any) -> "CachedKeys":
        return CachedKeys(self.new[index], self.layer)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            raise ValueError(
                "the cache has states of linattn, which F.scaled_dot_product_attention cannot continue: after "
                "set_attn_implementation begin a new cache"
            )
        first = next(keys for keys in _flat((args, kwargs)) if isinstance(keys, CachedKeys))
        return first._call(function, args, kwargs or {})

    def _call(self, function: Callable[..., Any], args: Any, options: Any) -> Any:
        return _join(function(*_split(args), **_split(options)), self.layer)


def tensor_of(keys: Tensor | CachedKeys) -> Tensor:
    """Return the new keys, or values that were computed from them, without the layer."""
    return keys.new if isinstance(keys, CachedKeys) else keys


def _join(values: Any, layer: "AttentionLayer") -> Any:
    """Give the layer to all tensors in the result of a function."""
    if isinstance(values, Tensor):
        return CachedKeys(values, layer)
    return tuple(_join(each, layer) for each in values) if type(values) in (tuple, list) else values


def _split(values: Any) -> Any:
    """Return the arguments of a function with tensors in the places of cached keys."""
    if isinstance(values, dict):
        return {name: _split(each) for name, each in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_split(each) for each in values)
    return tensor_of(values)


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, (dict, tuple, list)):
        for each in values.values() if isinstance(values, dict) else values:
            yield from _flat(each)
    else:
        yield values


class AttentionLayer(StateLayer):
    """The state of one attention of a stock model: of its past tokens or, for cross-attention, of the encoder's."""

    _layer_type = ATTENTION_LAYER

    keys: Any

    def __init__(self) -> None:
        # heads stand before the tokens of the attention
        super().__init__(2, 1)
        self.attention, self.convolution = self.histories
        """The state of the attention, and the last inputs of a short convolution before it, if there is one."""

    def reset(self) -> None:
        super().reset()
        self.waiting = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[CachedKeys, Tensor]:
        self.seen += key_states.shape[2]
        self.waiting += key_states.shape[2]
        return CachedKeys(key_states, self), value_states

    def extend(
        self, inner: InnerAttention, q: Queries, k: Tensor, v: Values, key_mask: KeyMask, *, gates: AnyGates = None
    ) -> Outputs:
        self.waiting -= k.shape[2]
        if self.waiting:
            raise ValueError(
                f"{self.seen} tokens came into the cache, but {self.seen - self.waiting} into its state: a model that "
                "attends twice to the same keys, or elsewhere, needs use_cache=False"
            )

        def read(inputs: Any, state: Any) -> tuple[Outputs, Any]:
            q, k, v, key_mask, gates = inputs
            return inner.extend(q, k, v, state, key_mask=key_mask, gates=gates)

        return self.attention.extend(read, (q, k, v, key_mask, gates))

    def read(self, inner: InnerAttention, q: Queries, k: Tensor, v: Values, key_mask: KeyMask) -> Outputs:
        """Attend to an encoder's keys and values, which are summarized at the first call."""
        if self.attention.state is None:
            self.attention.state = inner.summarize(k, v, key_mask=key_mask)
            # from now on the model passes these on in place of new ones
            self.keys, self.values = CachedKeys(k[:, :, :0].clone(), self), v[:, :, :0].clone()
        elif k.shape[2]:
            raise ValueError("a state of attention that is not causal takes no more keys: give use_cache=False")
        return inner.read(q, self.attention.state)
