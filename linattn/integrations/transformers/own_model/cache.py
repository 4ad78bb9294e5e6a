"""transformers' Cache for our model: one state of constant size."""

from typing import Any

from transformers.cache_utils import Cache
from transformers.utils.deprecation import deprecate_kwarg

from linattn.checks import check_sizes
from linattn.integrations.transformers.history import Read
from linattn.integrations.transformers.state_layer import StateLayer
from linattn.models import TokenModelState
from linattn.ops.nested import checked_kind

old_cache_name = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
"""Lets a forward take its `cache` by the name that other libraries may still use, as long as stock models do."""


class LinattnCache(Cache):
    """Holds the `state` of the whole model in one layer, that of a `LanguageModel` after `num_tokens` tokens; None is
    that before the first one. `generate` skips so many tokens of its input, and masks have so many more columns than
    there are new tokens. Only softmax blocks keep all their keys and values, and grow.

    After `activate_past_recording`, `crop(-n)` takes the last n tokens back, those since the last `crop` or at least
    256. For this the cache keeps these tokens and one or two states before them; without recording, nothing."""

    layers: list[StateLayer]

    def __init__(self, state: TokenModelState | None = None, *, num_tokens: int = 0):
        super().__init__(layers=[StateLayer(1)])
        check_sizes(num_tokens=num_tokens, least=0)
        if state is None and num_tokens:
            raise ValueError(f"num_tokens is {num_tokens}, but there is no state: nothing was read")
        if state is not None:
            self.put_state(checked_kind(state, TokenModelState), num_tokens)

    @property
    def state(self) -> TokenModelState | None:
        """The state for `LanguageModel.extend` and `linattn.generate`, None if there is no past."""
        return self.layers[0].histories[0].state

    def put_state(self, state: TokenModelState, num_tokens: int) -> None:
        """Store the state after `num_tokens` more tokens, which cannot be taken back."""
        (layer,) = self.layers
        layer.histories[0].reset()
        layer.histories[0].state = state
        layer.seen += num_tokens

    def extend(self, read: Read, inputs: Any, num_tokens: int) -> Any:
        """Return the outputs of `read` for the inputs of `num_tokens` more tokens, and keep the state after them."""
        (layer,) = self.layers
        layer.seen += num_tokens
        return layer.histories[0].extend(read, inputs)
