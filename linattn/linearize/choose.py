"""The choice of the layers that stay softmax: those whose return brings the model nearest to its teacher.

The layer with the largest error of its own is not always the one, so each is tried."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from linattn.linearize.distance import divergence
from linattn.linearize.observe import Batch
from linattn.linearize.parts import linearized_layers, own_attention


@dataclass(frozen=True)
class Choice:
    """`kept` are the indices of the layers to keep, the best first; `before` is the divergence from the teacher with
    every layer linear, and `restored` that with each layer restored alone, by its index."""

    kept: tuple[int, ...]
    before: float
    restored: dict[int, float]


def choose_layers(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch], count: int) -> Choice:
    """Give one layer at a time its softmax back, and return the `count` whose return lowers the divergence on the
    `batches` most.

    The model stays as it is: `restore_layers` acts on the choice."""
    layers = linearized_layers(model)
    if not 0 <= count <= len(layers):
        raise ValueError(f"count must be from 0 to {len(layers)}, the linear layers, but is {count}")
    restored = {}
    for name, layer in layers.items():
        index = own_attention(layer).spec.index
        model.set_submodule(name, teacher.get_submodule(name))
        try:
            restored[index] = divergence(model, teacher, batches)
        finally:
            model.set_submodule(name, layer)
    kept = sorted(restored, key=lambda index: restored[index])[:count]
    return Choice(tuple(kept), divergence(model, teacher, batches), restored)
