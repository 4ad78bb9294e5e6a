"""transformers' Cache for our model: one state of constant size per block."""

from transformers.cache_utils import Cache

from linattn.integrations.transformers.state_layer import StateLayer
from linattn.models import TokenModelState


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
