"""One layer of transformers' cache that holds a state of constant size, not the keys and values of every token."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin

from linattn.integrations.transformers.history import History
from linattn.ops.nested import tensors_in


class StateLayer(CacheLayerMixin):
    """Holds states, each with its history; `seen` is the number of tokens in them, including padding.

    After `activate_past_recording` the last tokens can be taken back by `crop`, as assisted decoding does."""

    supports_early_init = False
    is_croppable = True

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.histories = tuple(map(History, axes))
        self.reset()

    @property
    def record_past(self) -> bool:
        """True if tokens can be taken back; transformers reads and sets it by this name."""
        return self.histories[0].recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        for history in self.histories:
            history.recording = value

    def activate_past_recording(self) -> None:
        self.record_past = True

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which means no limit in transformers."""
        return -1

    def reset(self) -> None:
        for history in self.histories:
            history.reset()
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Take back as many of the last tokens as the negative number says, exactly: the tokens before them that are
        recorded are read again. Raises ValueError if more are to go than are recorded, or for a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens, but tokens_to_remove is {tokens_to_remove}")
        for history in self.histories:
            # a layer may be empty, or have no convolution
            if history.state is not None:
                history.crop(-tokens_to_remove)
        self.seen = max(self.seen + tokens_to_remove, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        raise NotImplementedError("a LinattnCache holds states, not keys and values: only a linattn model can fill it")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.lazy_initialization(key_states, value_states)

    def offload(self) -> NoReturn:
        raise NotImplementedError("a state is of constant size and stays where the model is")

    def prefetch(self) -> NoReturn:
        self.offload()

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for history in self.histories:
            history.map(function)


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of the states, or of the keys and values, of all layers of a cache."""
    return sum(x.nbytes for layer in cache.layers for x in _tensors(layer))


def _tensors(layer: Any) -> list[Tensor]:
    if isinstance(layer, StateLayer):
        return [x for history in layer.histories if history.state is not None for x in tensors_in(history.state)]
    return [x for x in tree_leaves(vars(layer)) if isinstance(x, Tensor)]
