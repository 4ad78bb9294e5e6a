"""transformers' hybrid models with our scans, on any device: nothing to compile, and rows may hold several documents.

transformers' functions are globals of a model's module, or a layer's forward. Ours stand before them and act only where
a model that was sped up calls: its calls carry a mark, which a hook adds and every layer passes on with its keyword
arguments. Everything else, other models of the same class too, gets transformers' own function."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from importlib.util import find_spec
from inspect import Parameter, Signature, signature, unwrap
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from linattn.integrations.transformers.packed_rows import LEAKING, TOLD_BY, documents_apart, family
from linattn.integrations.transformers.scans import convolution, delta_rule, lightning_attention, mamba2_scan

MARK = "linattn_documents"
"""The keyword argument of marked calls: the number of each token's document, or None for one document per row."""
CONVOLUTION = "causal_conv1d_fn"


class Scan(NamedTuple):
    """Our function in the place of transformers', the operator inside it, and the package whose kernels come first."""

    function: Callable[..., Any]
    operator: str
    package: str | None


SCANS = {
    "torch_chunk_gated_delta_rule": Scan(delta_rule, "causal_delta_attention", "fla"),
    "chunk_kimi_delta_attention": Scan(delta_rule, "causal_delta_attention", "fla"),
    "mamba2_chunk_scan": Scan(mamba2_scan, "causal_linear_attention", "mamba_ssm"),
    "MiniMaxLightningAttention.forward": Scan(lightning_attention, "causal_linear_attention", None),
    CONVOLUTION: Scan(convolution, "a sum of shifted products, for packed rows", "causal_conv1d"),
}
RECURRENT = {
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
}
SELECTIVE = {"selective_scan_fn"}
KEPT = {
    "recurrent": "one token at a time, transformers' own function is as fast",
    "selective": "its decay is a number per channel and per number of the state, which no state of ours has",
    "softmax": 'softmax attention is not a scan; `set_attn_implementation("linattn:…")` replaces it by another method',
}


@dataclass(frozen=True)
class Place:
    """A name in a module of transformers, `function` or `Class.method`, where a call looks a scan up."""

    module: str
    name: str

    def owner(self) -> Any:
        module, (*outer, _) = importlib.import_module(self.module), self.name.split(".")
        return getattr(module, outer[0]) if outer else module

    def current(self) -> Callable[..., Any]:
        return getattr(self.owner(), self.name.split(".")[-1])

    def put(self, function: Callable[..., Any]) -> None:
        setattr(self.owner(), self.name.split(".")[-1], function)

    def install(self) -> None:
        """Put our function before transformers', unless it is there."""
        if not hasattr(self.current(), "stock"):
            self.put(_before(self.current(), SCANS[self.name]))

    def restore(self) -> None:
        """Put transformers' function back, unless somebody has put another one there since."""
        if hasattr(self.current(), "stock"):
            self.put(self.current().stock)


class Marker:
    """A hook that marks the calls of a model's layers."""

    def __init__(self, model: PreTrainedModel, places: set[Place]):
        self.places, self.names = places, tuple(signature(model.forward).parameters)
        self.told: dict[str, Any] = {}
        markers.add(self)

    def __call__(
        self, model: PreTrainedModel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling():
            # a copy of the model, or one loaded in another process, finds nothing there
            for place in self.places:
                place.install()
        given = self.told | dict(zip(self.names, args, strict=False)) | options
        self.told = {}
        documents, changes = documents_apart(model, given, self.names)
        for name in TOLD_BY[: "position_ids" not in self.names]:
            given.pop(name, None)
        return (), {**given, **changes, MARK: documents}

    def tell(self, head: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Remember what a head does not pass on to the model inside it."""
        self.told = {name: options[name] for name in TOLD_BY if options.get(name) is not None}


markers: "WeakSet[Marker]" = WeakSet()


@dataclass
class SpeedUp:
    """What `speed_up` did: `replaced` maps each layer to the functions in it and ours, `kept` what stays to the reason.
    `undo()` gives the model transformers' own functions back."""

    model: str
    replaced: dict[str, str]
    kept: dict[str, str]
    _handles: list[RemovableHandle] = field(repr=False)
    _markers: list[Marker] = field(repr=False)

    def undo(self) -> None:
        """Remove what `speed_up` put in. Where no other model needs it, transformers' modules hold their own functions
        again."""
        for handle in self._handles:
            handle.remove()
        places = {place for marker in self._markers for place in marker.places}
        markers.difference_update(self._markers)
        for place in places - {place for marker in markers for place in marker.places}:
            place.restore()
        self._handles, self._markers = [], []

    def __str__(self) -> str:
        lines = [f"{count} × {what}" for what, count in Counter(self.replaced.values()).items()]
        kept = [f"{what}: {why}" for what, why in self.kept.items()]
        return "\n  ".join([f"{self.model}, replaced:", *lines]) + "\n  ".join(["\nkept:", *kept])


def speed_up(model: PreTrainedModel, /) -> SpeedUp:
    """Replace the scans of transformers' linear attention in `model` by ours, in place; print and return what was
    replaced, and what was not and why.

    They compute the same, several times faster wherever flash-linear-attention and mamba-ssm do not run, and keep the
    documents of packed rows apart, told by `position_ids` that restart, `seq_idx` or `cu_seq_lens_q`. Weights,
    caches and decoding are transformers' own. Other models, of the same class too, stay as they are.

    Raises ValueError for a model without such a scan or sped up already, ImportError for a version of transformers
    whose functions take other arguments."""
    found, kept = _find(model)
    if not found:
        reasons = "".join(f"; {what}: {why}" for what, why in kept.items())
        raise ValueError(f"{type(model).__name__} has no scan that linattn could replace{reasons}")
    layers = dict(model.named_modules())
    owners: dict[str, set[Place]] = {}
    for name, places in found.items():
        owners.setdefault(_owner(layers, name), set()).update(places)
    if any(isinstance(hook, Marker) for owner in owners for hook in layers[owner]._forward_pre_hooks.values()):
        raise ValueError(f"this {type(model).__name__} was sped up already")
    for place in set().union(*owners.values()):
        _check_signature(place)
    handles, made = [], []
    for owner, places in owners.items():
        marker = Marker(layers[owner], places)
        handles.append(layers[owner].register_forward_pre_hook(marker, with_kwargs=True))
        if layers[owner] is not model and "position_ids" not in marker.names:
            handles.append(model.register_forward_pre_hook(marker.tell, with_kwargs=True))
        for place in places:
            place.install()
        made.append(marker)
    replaced = {name: _described(places) for name, places in found.items()}
    record = SpeedUp(type(model).__name__, replaced, kept, handles, made)
    print(record)
    return record


def _find(model: nn.Module) -> tuple[dict[str, set[Place]], dict[str, str]]:
    """Return the places of the scans in each layer that has one, and what stays, with reasons."""
    found: dict[str, set[Place]] = {}
    kept: dict[str, str] = {}
    for name, layer in model.named_modules():
        kind = type(layer)
        called = {*_names_called(layer), f"{kind.__name__}.forward"}
        places = {Place(kind.__module__, scan) for scan in SCANS if scan in called}
        kept |= {function: KEPT["recurrent"] for function in called & RECURRENT}
        if called & SELECTIVE:
            kept[kind.__name__] = KEPT["selective"]
        elif reason := _has_kernels(layer, places):
            kept[kind.__name__] = reason
        elif {place.name for place in places} - {CONVOLUTION}:
            found[name] = places
        elif hasattr(layer, "is_causal"):
            kept[kind.__name__] = KEPT["softmax"]
        if isinstance(layer, PreTrainedModel) and family(layer) in LEAKING:
            kept["packed rows"] = LEAKING[family(layer)]
    return found, kept


def _names_called(layer: nn.Module) -> tuple[str, ...]:
    """Return the names in the code of a layer's forward, without the decorators around it."""
    return getattr(unwrap(type(layer).forward), "__code__", _names_called.__code__.replace(co_names=())).co_names


def _has_kernels(layer: nn.Module, places: set[Place]) -> str:
    """Return why a layer's scan is better left to a package's kernels, or nothing."""
    device = next((parameter.device.type for parameter in layer.parameters()), "cpu")
    packages = {SCANS[place.name].package for place in places if place.name != CONVOLUTION} - {None}
    if device in ("cuda", "xpu"):
        for package in packages:
            if package is not None and find_spec(package) is not None:
                return f"{package} is installed and has kernels for {device}"
    return ""


def _owner(layers: dict[str, nn.Module], name: str) -> str:
    """Return the name of the innermost model of transformers around a layer."""
    while not isinstance(layers[name], PreTrainedModel):
        name = name.rpartition(".")[0]
    return name


def _before(stock: Callable[..., Any], scan: Scan) -> Callable[..., Any]:
    """Return a function that calls ours where the mark is, and transformers' elsewhere."""

    @wraps(stock)
    def call(*args: Any, **options: Any) -> Any:
        marked, documents = MARK in options, options.pop(MARK, None)
        if not marked or (documents is None and scan.function is convolution):
            return stock(*args, **options)
        return scan.function(*args, documents=documents, **options)

    call.stock = stock  # type: ignore[attr-defined]
    return call


def _check_signature(place: Place) -> None:
    stock, ours = signature(place.current()), signature(SCANS[place.name].function)
    if _parameters(stock) != _parameters(ours):
        raise ImportError(
            f"transformers {transformers.__version__} calls {place.module}.{place.name}{stock}, but linattn replaces it "
            f"by a function of {ours}: it was written for 5.23"
        )


def _parameters(given: Signature) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in given.parameters.values() if p.kind is not Parameter.KEYWORD_ONLY]


def _described(places: set[Place]) -> str:
    names = sorted(place.name for place in places if place.name != CONVOLUTION)
    return ", ".join(f"{name} by {SCANS[name].operator}" for name in names)
