"""transformers' hybrid models with our scans, on any device: nothing to compile, and rows may hold several documents.

A hook marks the calls of a model that was sped up. Every layer passes the mark on with its keyword arguments, as far as
the functions of `places`."""

from collections import Counter
from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from linattn.integrations.transformers.documents import MARK
from linattn.integrations.transformers.hybrids.packed_rows import TOLD_BY, documents_apart, why_not_packed
from linattn.integrations.transformers.hybrids.places import (
    CONVOLUTION,
    SCANS,
    Place,
    names_called,
    places_in,
    why_kernels,
)

RECURRENT = {
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
}
STEPS = "decoding steps stay transformers' own, which are fast"
SELECTIVE = "its decay is a number per channel and per number of the state, which no state of ours has"
SOFTMAX = "softmax attention is no scan; set_attn_implementation('linattn:…') puts another method there"


class Marker:
    """A hook that marks the calls inside a model, and of its head if that passes on less."""

    def __init__(self, model: nn.Module, head: nn.Module | None, places: set[Place]):
        self.places, self.names = places, tuple(signature(model.forward).parameters)
        self.told: dict[str, Any] = {}
        self.handles = [model.register_forward_pre_hook(self, with_kwargs=True)]
        if head is not None and "position_ids" not in self.names:
            self.handles.append(head.register_forward_pre_hook(self.tell, with_kwargs=True))
        _markers.add(self)
        self.install()

    def __call__(
        self, model: PreTrainedModel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            # a copy of a model, or one loaded in another process, comes without our functions
            self.install()
        given = self.told | dict(zip(self.names, args, strict=False)) | options
        self.told = {}
        documents, changes = documents_apart(model, given, self.names)
        return (), {**given, **changes, MARK: documents}

    def install(self) -> None:
        for place in self.places:
            place.install()

    def tell(self, head: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Remember what a head does not pass on to the model inside it."""
        self.told = {name: options[name] for name in TOLD_BY if options.get(name) is not None}


_markers: WeakSet[Marker] = WeakSet()


@dataclass
class SpeedUp:
    """Tells what `speed_up` did to a `model`, by its name: `replaced` has the function and ours for each layer, `kept`
    the reason for whatever stays."""

    model: str
    replaced: dict[str, str]
    kept: dict[str, str]
    _marks: list[Marker] = field(init=False, repr=False, default_factory=list)

    def undo(self) -> None:
        """Give the model transformers' own functions back. Where no other model needs ours, transformers' modules hold
        the functions that they held before."""
        for marker in self._marks:
            for handle in marker.handles:
                handle.remove()
        _markers.difference_update(self._marks)
        needed = {place for marker in _markers for place in marker.places}
        for place in {place for marker in self._marks for place in marker.places} - needed:
            place.restore()
        self._marks = []

    def __str__(self) -> str:
        replaced = [f"  replaced in {count} layers: {what}" for what, count in Counter(self.replaced.values()).items()]
        kept = [f"  kept: {what} ({why})" for what, why in self.kept.items()]
        return "\n".join([f"{self.model}", *replaced, *kept])


def speed_up(model: nn.Module, /) -> SpeedUp:
    """Replace the scans of linear attention in a `model` of transformers by ours, in place. Print and return what was
    replaced, and what was not and why.

    Ours compute the same, several times faster where flash-linear-attention and mamba-ssm do not run. They keep apart
    the documents of a row, which `position_ids` that restart, `seq_idx` or `cu_seq_lens_q` tell. Weights, caches
    and decoding steps are transformers' own; other models, of the same class too, stay as they are.

    Raises ValueError for a model that has no such scan or was sped up already, and ImportError for a version of
    transformers whose functions take other arguments."""
    layers = dict(model.named_modules())
    found, kept = _find(layers)
    if why := why_not_packed(model):
        kept["rows of several documents"] = why
    if not found:
        reasons = "".join(f"; {what}: {why}" for what, why in kept.items())
        raise ValueError(f"{type(model).__name__} has no scan that linattn could replace{reasons}")
    owners: dict[str, set[Place]] = {}
    for name, places in found.items():
        owner = _model_around(layers, name)
        if owner is None:
            raise ValueError(f"{type(model).__name__} is no model of transformers, nor does it hold one")
        owners.setdefault(owner, set()).update(places)
    if any(isinstance(hook, Marker) for name in owners for hook in layers[name]._forward_pre_hooks.values()):
        raise ValueError(f"this {type(model).__name__} was sped up already")
    for place in sorted(set().union(*owners.values()), key=str):
        place.check_signature()
    record = SpeedUp(type(model).__name__, {name: _described(places) for name, places in found.items()}, kept)
    for name, places in owners.items():
        head = _model_around(layers, name.rpartition(".")[0]) if name else None
        record._marks.append(Marker(layers[name], None if head is None else layers[head], places))
    print(record)
    return record


def _find(layers: dict[str, nn.Module]) -> tuple[dict[str, set[Place]], dict[str, str]]:
    """Return the places of the scans for each layer that has one, and what stays, with reasons."""
    found: dict[str, set[Place]] = {}
    kept: dict[str, str] = {}
    for name, layer in layers.items():
        kind, called, places = type(layer).__name__, names_called(layer), places_in(layer)
        if why := why_kernels(layer, places):
            kept[kind] = why
        elif places:
            found[name] = places
            kept |= dict.fromkeys(sorted(called & RECURRENT), STEPS)
        elif "mamba_selective_scan" in called:
            kept[kind] = SELECTIVE
        elif hasattr(layer, "is_causal"):
            kept[kind] = SOFTMAX
    return found, kept


def _model_around(layers: dict[str, nn.Module], name: str) -> str | None:
    """Return the name of the innermost model of transformers that holds a layer or is it, None if there is none."""
    while not isinstance(layers[name], PreTrainedModel):
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _described(places: set[Place]) -> str:
    names = sorted(place.name for place in places if place.name != CONVOLUTION)
    return ", ".join(f"{name} by {SCANS[name].operator}" for name in names)
