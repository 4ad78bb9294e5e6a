"""The names under which transformers' models look up their scans, and the functions that call ours in their place.

Such a name is a global of a model's module, or a layer's forward. Our functions run only in calls with a mark, so that
all other models, of the same class too, run transformers' own."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from inspect import Parameter, signature, unwrap
from typing import Any, NamedTuple

import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle

from linattn.integrations.transformers.documents import MARK
from linattn.integrations.transformers.hybrids.recording import recorded
from linattn.integrations.transformers.hybrids.scans import (
    convolution,
    delta_rule,
    lightning_attention,
    mamba2_scan,
    mamba_scan,
)


class Scan(NamedTuple):
    """Our function for one of transformers', the operator that it calls, and the package whose kernels are preferred.
    If tokens can be taken back, `tokens` names the arguments (b n …) and `state` that of the state before them."""

    function: Callable[..., Any]
    operator: str
    package: str | None = None
    tokens: tuple[str, ...] = ()
    state: str = ""


DELTA = ("query", "key", "value", "g", "beta"), "initial_state"
CONVOLUTION = "causal_conv1d_fn"
SCANS = {
    "torch_chunk_gated_delta_rule": Scan(delta_rule, "causal_delta_attention", "fla", *DELTA),
    "chunk_kimi_delta_attention": Scan(delta_rule, "causal_delta_attention", "fla", *DELTA),
    "mamba2_chunk_scan": Scan(
        mamba2_scan, "causal_linear_attention", "mamba_ssm", ("hidden_states", "dt", "B", "C"), "initial_states"
    ),
    "mamba_selective_scan": Scan(mamba_scan, "a selective scan in chunks", "mamba_ssm"),
    "MiniMaxLightningAttention.forward": Scan(lightning_attention, "causal_linear_attention"),
    CONVOLUTION: Scan(convolution, "a sum of shifted products"),
}
WITHOUT_MARK = {"mamba_selective_scan"}
"""Functions that layers call without their own keyword arguments: neither a mark nor documents reach them."""

_marked_layers: list[None] = []


RECORDING = "recording"
"""The mark of calls whose tokens the cache may take back, in the place of the numbers of documents."""


@dataclass(frozen=True)
class Place:
    """A name in a module of transformers: `function` or `Class.method`."""

    module: str
    name: str

    def read(self) -> Any:
        """Return the current function of this name. If it is ours, its attribute `stock` is the
        function of transformers."""
        return getattr(self._owner(), self._attribute())

    def install(self) -> None:
        """Replace transformers' function by ours, unless that is done already."""
        if not hasattr(self.read(), "stock"):
            setattr(self._owner(), self._attribute(), _before(self.read(), SCANS[self.name]))

    def restore(self) -> None:
        """Restore transformers' function, unless another one has replaced ours since."""
        if hasattr(self.read(), "stock"):
            setattr(self._owner(), self._attribute(), self.read().stock)

    def check_signature(self) -> None:
        """Raise ImportError unless our function takes the arguments of transformers'."""
        stock, ours = signature(self.read()), signature(SCANS[self.name].function)
        theirs, expected = (
            [(p.name, p.kind, p.default) for p in each.parameters.values() if p.kind is not Parameter.KEYWORD_ONLY]
            for each in (stock, ours)
        )
        if theirs != expected:
            raise ImportError(
                f"{self.name} of transformers {transformers.__version__} is {stock}, but linattn replaces "
                f"{ours}, as in 5.24"
            )

    def _owner(self) -> Any:
        module, (*outer, _) = importlib.import_module(self.module), self.name.split(".")
        return getattr(module, outer[0]) if outer else module

    def _attribute(self) -> str:
        return self.name.rpartition(".")[2]


def places_in(layer: nn.Module) -> set[Place]:
    """Return the names, each as a `Place`, under which a layer's forward finds scans; none if it has no scan."""
    names = global_names(layer) & SCANS.keys()
    return set() if names <= {CONVOLUTION} else {Place(_forward(layer).__module__, name) for name in names}


def global_names(layer: nn.Module) -> set[str]:
    """Return the names that the code of a layer's forward looks up, and the qualified name of this forward."""
    forward = _forward(layer)
    code = getattr(forward, "__code__", None)
    return {forward.__qualname__, *(() if code is None else code.co_names)}


def lacks_mark(layer: nn.Module) -> bool:
    """Return whether a layer does not pass its keyword arguments, and with them the mark, on to its scan."""
    return not global_names(layer).isdisjoint(WITHOUT_MARK)


def mark_layer(layer: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Mark every call that a layer makes, by two hooks around its forward, so that the functions installed by `Place`
    use our scans in these calls."""
    return layer.register_forward_pre_hook(_enter), layer.register_forward_hook(_leave, always_call=True)


def _enter(*_: Any) -> None:
    _marked_layers.append(None)


def _leave(*_: Any) -> None:
    _marked_layers.pop()


def kernel_preference(layer: nn.Module, places: set[Place]) -> str:
    """Return the reason to leave a layer's scan to the kernels of a package, an empty text if there is none."""
    device = next((parameter.device.type for parameter in layer.parameters()), "cpu")
    packages = {SCANS[place.name].package for place in places} - {None} if device in ("cuda", "xpu") else ()
    installed = [package for package in packages if package and find_spec(package) is not None]
    return f"{installed[0]} is installed and has kernels for {device}" if installed else ""


def _forward(layer: nn.Module) -> Callable[..., Any]:
    """Return a layer's forward without decorators."""
    return unwrap(type(layer).forward)


def _before(stock: Callable[..., Any], ours: Scan) -> Callable[..., Any]:
    """Return a function that calls ours if the call, or the layer around it, has the mark, else transformers'."""

    @wraps(stock)
    def call(*args: Any, **options: Any) -> Any:
        marked, documents = MARK in options or _marked_layers, options.pop(MARK, None)
        if not marked:
            return stock(*args, **options)
        if callable(documents):
            # the tokens are a part of a sequence that several processes share
            return documents(ours, args, options)
        if documents is not RECORDING:
            return ours.function(*args, documents=documents, **options)
        if ours.tokens:
            return recorded(ours.function, ours.tokens, ours.state, args, options)
        return ours.function(*args, **options)

    vars(call)["stock"] = stock
    return call
