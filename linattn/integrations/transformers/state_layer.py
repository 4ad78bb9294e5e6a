"""One layer of transformers' cache that holds a state of constant size, not the keys and values of every token."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from linattn.attention import map_state


class StateLayer(CacheLayerMixin):
    """Holds the state of one block, which is replaced and never written to; `seen` is the number of tokens in it,
    including padding."""

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
