"""transformers' hybrid models with our scans, on any device: nothing to compile, and rows may hold several documents.

`speed_up` installs a hook that adds a marker keyword to each call of the model. Layers pass it on with their other
keyword arguments, and the functions that `places` has replaced then use our scans."""

from collections import Counter
from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from linattn.integrations.transformers.documents import MARK
from linattn.integrations.transformers.hybrids.packed_rows import (
    CACHE_ARGUMENTS,
    DOCUMENT_ARGUMENTS,
    cache_in,
    document_numbers,
    num_tokens,
    packing_obstacle,
)
from linattn.integrations.transformers.hybrids.places import (
    CONVOLUTION,
    RECORDING,
    SCANS,
    Place,
    global_names,
    kernel_preference,
    lacks_mark,
    mark_layer,
    places_in,
)
from linattn.integrations.transformers.hybrids.recording import begin_call

RECURRENT = {
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba_selective_state_update",
    "mamba2_selective_state_update",
}
STEPS = "decoding steps stay transformers' own, which are fast"
SOFTMAX = "softmax attention is no scan; set_attn_implementation('linattn:…') puts another method there"


class Marker:
    """Two hooks: one, before each call of the model, tells the replaced functions in `places` that a call has begun;
    the other stores those arguments of `head`, the model around it, that `head` does not pass on to the model."""

    handover: Any = None
    """Calls the scans of a model whose sequences several processes share."""

    def __init__(self, model: nn.Module, head: nn.Module | None, places: set[Place]):
        self.places, self.names = places, tuple(signature(model.forward).parameters)
        self.obstacle = packing_obstacle(model)
        self.head_arguments: dict[str, Any] = {}
        self.handles = [model.register_forward_pre_hook(self, with_kwargs=True)]
        if head is not None and "position_ids" not in self.names:
            self.handles.append(head.register_forward_pre_hook(self.store, with_kwargs=True))
        for layer in model.modules():
            self.handles += mark_layer(layer) if places and lacks_mark(layer) else ()
        _markers.add(self)
        self.install()

    def __call__(
        self, model: PreTrainedModel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            # a copy of a model, or one loaded in another process, comes without our functions
            self.install()
        arguments = self.head_arguments | dict(zip(self.names, args, strict=False)) | options
        self.head_arguments = {}
        documents, changes = document_numbers(model, arguments, self.names, self.obstacle)
        past = None if torch.compiler.is_compiling() else cache_in(arguments)
        if past is not None and begin_call(past, num_tokens(arguments)):
            documents = RECORDING
        if self.handover is not None:
            if documents is not None:
                raise ValueError("a model whose sequences are sharded takes one document per row")
            documents = self.handover
        return (), {**arguments, **changes, MARK: documents}

    def install(self) -> None:
        for place in self.places:
            place.install()

    def store(self, head: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Store the arguments that a head does not pass on to the model inside it."""
        self.head_arguments = {name: options[name] for name in DOCUMENT_ARGUMENTS if options.get(name) is not None}


_markers: WeakSet[Marker] = WeakSet()


@dataclass
class SpeedUp:
    """Records the changes of `speed_up` to a model. `model` is the name of its class; `replaced` has, for each layer,
    transformers' function and our operator for it; `kept` has the reason for everything that stays."""

    model: str
    replaced: dict[str, str]
    kept: dict[str, str]
    _marks: list[Marker] = field(init=False, repr=False, default_factory=list)
    _stateful: list[Any] = field(init=False, repr=False, default_factory=list)

    def undo(self) -> None:
        """Restore transformers' own functions for this model, and in transformers' modules, too, if no other model uses
        ours."""
        for marker in self._marks:
            for handle in marker.handles:
                handle.remove()
        _markers.difference_update(self._marks)
        needed = {place for marker in _markers for place in marker.places}
        for place in {place for marker in self._marks for place in marker.places} - needed:
            place.restore()
        self._marks = []
        for model in self._stateful:
            del model._is_stateful
        self._stateful = []

    def __str__(self) -> str:
        replaced = [f"  replaced in {count} layers: {what}" for what, count in Counter(self.replaced.values()).items()]
        kept = [f"  kept: {what} ({why})" for what, why in self.kept.items()]
        return "\n".join([f"{self.model}", *replaced, *kept])


def speed_up(model: nn.Module, /) -> SpeedUp:
    """Replace the scans of linear attention in a `model` of transformers by ours, in place. Print and return what was
    replaced, and what was not and why.

    Ours compute the same, several times faster where flash-linear-attention and mamba-ssm do not run. They keep the
    documents of a row apart, according to `position_ids` that restart, `seq_idx` or `cu_seq_lens_q`. Weights, caches
    and decoding steps are transformers' own; other models, of the same class too, stay as they are.

    Raises ValueError for a model that has no such scan or was sped up already, and ImportError for a version of
    transformers whose functions take other arguments."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, but is a {type(model).__name__}")
    layers = dict(model.named_modules())
    scans, kept = _scans(layers)
    if why := packing_obstacle(model):
        kept["rows of several documents"] = why
    if not scans:
        reasons = "".join(f"; {what}: {why}" for what, why in kept.items())
        raise ValueError(f"{type(model).__name__} has no scan that linattn could replace{reasons}")
    owners: dict[str, set[Place]] = {}
    for name, places in scans.items():
        owner = _model_around(layers, name)
        if owner is None:
            raise ValueError(f"{type(model).__name__} is no model of transformers, nor does it hold one")
        owners.setdefault(owner, set()).update(places)
    if any(isinstance(hook, Marker) for name in owners for hook in layers[name]._forward_pre_hooks.values()):
        raise ValueError(f"this {type(model).__name__} was sped up already")
    for place in sorted(set().union(*owners.values()), key=str):
        place.check_signature()
    for name in owners:
        _check_cache(layers[name])
    record = SpeedUp(type(model).__name__, {name: _operators(places) for name, places in scans.items()}, kept)
    for name, places in owners.items():
        head = _model_around(layers, name.rpartition(".")[0]) if name else None
        record._marks.append(Marker(layers[name], None if head is None else layers[head], places))
    if _all_recorded(scans, kept):
        # transformers refuses assisted decoding for such models, as their own caches cannot be cropped
        record._stateful = [each for each in layers.values() if getattr(each, "_is_stateful", False)]
        for each in record._stateful:
            each._is_stateful = False
    print(record)
    return record


def _all_recorded(scans: dict[str, set[Place]], kept: dict[str, str]) -> bool:
    """Return whether the tokens of all recurrent layers can be taken back."""
    names = {place.name for places in scans.values() for place in places} - {CONVOLUTION}
    return all(SCANS[name].tokens for name in names) and {*kept.values()} <= {STEPS, SOFTMAX}


def _check_cache(model: nn.Module) -> None:
    """Raise ImportError unless the model takes its cache under a name that `cache_in` knows: a call whose cache is not
    found would read wrong states."""
    if signature(model.forward).parameters.keys().isdisjoint(CACHE_ARGUMENTS):
        raise ImportError(
            f"{type(model).__name__} of transformers {transformers.__version__} takes no argument `cache`, but linattn "
            "looks for its cache there, as in 5.24"
        )


def _scans(layers: dict[str, nn.Module]) -> tuple[dict[str, set[Place]], dict[str, str]]:
    """Return the places of the scans to replace, and the reasons why others are kept, both by the layers' names."""
    scans: dict[str, set[Place]] = {}
    kept: dict[str, str] = {}
    for name, layer in layers.items():
        kind, called, places = type(layer).__name__, global_names(layer), places_in(layer)
        if why := kernel_preference(layer, places):
            kept[kind] = why
        elif places:
            scans[name] = places
            kept |= dict.fromkeys(sorted(called & RECURRENT), STEPS)
        elif hasattr(layer, "is_causal"):
            kept[kind] = SOFTMAX
    return scans, kept


def _model_around(layers: dict[str, nn.Module], name: str) -> str | None:
    """Return the name of the nearest PreTrainedModel around the layer (or the layer itself), or None."""
    while not isinstance(layers[name], PreTrainedModel):
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _operators(places: set[Place]) -> str:
    names = sorted(place.name for place in places if place.name != CONVOLUTION)
    return ", ".join(f"{name} by {SCANS[name].operator}" for name in names)
