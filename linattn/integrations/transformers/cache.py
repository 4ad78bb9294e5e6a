"""transformers' Cache for a batch: one state of constant size per block, not the keys and values of every token."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from linattn.attention import InnerAttention, map_state
from linattn.attention.gates import AnyGates
from linattn.models import TokenModelState
from linattn.types import KeyMask, Outputs, Queries, Values

ATTENTION_LAYER = "linattn"
"""The name by which transformers' DynamicCache finds our layer."""


class StateLayer(CacheLayerMixin):
    """One block's state, a value that is replaced and never written to; `seen` counts the tokens, including padding."""

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which means no limit in transformers."""
        return -1

    def reset(self) -> None:
        self.state: Any = None
        self.position: Tensor | None = None
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError("a state sums its tokens up, so the last ones cannot be taken out again")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        raise NotImplementedError("a LinattnCache holds states, not keys and values: only a linattn model can fill it")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.lazy_initialization(key_states, value_states)

    def offload(self) -> NoReturn:
        raise NotImplementedError("a state is of constant size and stays where the model is")

    def prefetch(self) -> NoReturn:
        self.offload()

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.state, self.position = map_state(function, (self.state, self.position))


class CachedKeys(NamedTuple):
    """The new keys, and the layer with the past, in place of the keys that a model hands from cache to attention."""

    new: Tensor
    layer: "AttentionLayer"


class AttentionLayer(StateLayer):
    """The state of one attention of a stock model: of its past tokens or, for cross-attention, of the encoder's."""

    _layer_type = ATTENTION_LAYER

    keys: Any
    convolution: Tensor | None
    """The last inputs of a short convolution before the attention, if there is one."""

    def reset(self) -> None:
        super().reset()
        self.waiting = 0
        self.convolution: Tensor | None = None

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
        y, self.state = inner.extend(q, k, v, self.state, key_mask=key_mask, gates=gates)
        return y

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        super()._map(function)
        self.convolution = map_state(function, self.convolution)

    def read(self, inner: InnerAttention, q: Queries, k: Tensor, v: Values, key_mask: KeyMask) -> Outputs:
        """Attend to an encoder's keys and values, which come once and are summarized."""
        if self.state is None:
            self.state = inner.summarize(k, v, key_mask=key_mask)
            # the model hands these on in place of new ones from now on
            self.keys, self.values = CachedKeys(k[:, :, :0].clone(), self), v[:, :, :0].clone()
        elif k.shape[2]:
            raise ValueError("a state of attention that is not causal takes no more keys: give use_cache=False")
        return inner.read(q, self.state)


class LinattnCache(Cache):
    """One StateLayer for each of the model's `num_layers` blocks. Only softmax blocks keep all their keys and values,
    and grow."""

    layers: list[StateLayer]

    def __init__(self, num_layers: int):
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])

    def get_state(self) -> TokenModelState | None:
        """Return the state for `LanguageModel.extend`, or None if there is no past."""
        if not self.get_seq_length():
            return None
        return TokenModelState(tuple(layer.state for layer in self.layers), self.layers[0].position)

    def put_state(self, state: TokenModelState, num_tokens: int) -> None:
        """Store the state after `num_tokens` more tokens."""
        for layer, block in zip(self.layers, state.stack, strict=True):
            layer.state, layer.position, layer.seen = block, state.position, layer.seen + num_tokens
