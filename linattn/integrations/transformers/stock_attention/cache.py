"""The layer of transformers' DynamicCache for a stock model that attends by our methods."""

from typing import Any, NamedTuple

from torch import Tensor

from linattn.attention import InnerAttention
from linattn.attention.gates import AnyGates
from linattn.integrations.transformers.state_layer import StateLayer
from linattn.types import KeyMask, Outputs, Queries, Values

ATTENTION_LAYER = "linattn"
"""The name by which transformers' DynamicCache finds our layer."""


class CachedKeys(NamedTuple):
    """The new keys, and the cache layer with the past. A model passes this pair from the cache to the attention
    function, where it would pass all keys."""

    new: Tensor
    layer: "AttentionLayer"


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
