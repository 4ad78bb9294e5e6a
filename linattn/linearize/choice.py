"""The choice of the layers that stay softmax: those that bring the model nearest to its teacher.

The layer with the largest error of its own is not always the best choice, so each is tried."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from linattn.checks import check_types
from linattn.linearize.attention import linearized_layers, own_attention
from linattn.linearize.calls import Batch
from linattn.linearize.distance import divergence, require_pair


@dataclass(frozen=True)
class Choice:
    """Holds the indices of the `kept` layers, the best first, the divergence `before` from the teacher with every layer
    linear, and the divergence with one layer `restored` to softmax, by the index of that layer."""

    kept: tuple[int, ...]
    before: float
    restored: dict[int, float]


@check_types
def choose_layers(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch], count: int) -> Choice:
    """Try every linear layer with the teacher's softmax attention, one at a time, and return the `count` layers that
    lower the divergence on the `batches` most.

    The model itself does not change: call `restore_layers` with the choice."""
    require_pair(model, teacher)
    layers = linearized_layers(model)
    if not 0 <= count <= len(layers):
        raise ValueError(f"count must be from 0 to {len(layers)}, the linear layers, but is {count}")
    restored = {}
    for name, layer in layers.items():
        model.set_submodule(name, teacher.get_submodule(name))
        try:
            restored[own_attention(layer).spec.index] = divergence(model, teacher, batches)
        finally:
            model.set_submodule(name, layer)
    best = sorted(restored, key=lambda index: restored[index])
    return Choice(tuple(best[:count]), divergence(model, teacher, batches), restored)
