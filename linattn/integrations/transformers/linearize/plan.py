"""The plan of a conversion: which layers of a stock model become linear, what they are built from, what it costs."""

import inspect
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.checks import check_sizes, given
from linattn.integrations.transformers.linearize.observe import SOFTMAX, Attended, Batch, attending_by, observe
from linattn.integrations.transformers.linearize.parts import LayerSpec, LinearizedAttention, linearized_layers
from linattn.ops.nested import map_state

TAYLOR_CHANNELS = 16, 32
"""Second-order Taylor features keep half of a head's channels, at least and at most these: φ has 153 numbers for 16 of
them and 561 for 32."""


@dataclass(frozen=True)
class LayerPlan:
    """Describes the attention module `name`, the `index`-th that the model runs.

    `spec` says what replaces it, with so many `new_weights`; None means that it stays, for the `reason`.
    `state_numbers` is the size of its state per sequence, where the cache of keys and values has `cache_numbers` per
    token. `sizes` are the numbers and the shapes of weights of the module, by which `convert` knows it."""

    index: int
    name: str
    spec: LayerSpec | None
    reason: str | None
    new_weights: int
    state_numbers: int
    cache_numbers: int
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Says for each layer what `convert` does, by the attention named `method`."""

    method: str
    layers: tuple[LayerPlan, ...]

    @property
    def replaced(self) -> tuple[LayerPlan, ...]:
        return tuple(layer for layer in self.layers if layer.spec is not None)

    @property
    def new_weights(self) -> int:
        return sum(layer.new_weights for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as JSON has them."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'becomes':<20}{'new weights':>12}{'state':>9}  cache per token"]
        for layer in self.layers:
            becomes = self.method if layer.spec else "stays"
            line = f"{layer.index:>5}  {becomes:<20}{layer.new_weights:>12,}{layer.state_numbers:>9,}  "
            lines.append(f"{line}{layer.cache_numbers:>7,}  {layer.name}{f': {layer.reason}' if layer.reason else ''}")
        return "\n".join(lines)


def plan(
    model: PreTrainedModel,
    batch: Batch | None = None,
    *,
    method: str = "taylor2",
    keep: Collection[int] = (),
    window: int = 16,
    key_dim: int | None = None,
    convolution: int = 4,
    decay: bool = True,
) -> Plan:
    """Run the model on a `batch` (None: its own dummy inputs) and plan to replace each attention that runs, but for
    those whose indices are in `keep`, by `method`, a name as in `named_attention`.

    Local heads see `window` tokens; a method without any gets a window of softmax beside it (0: none). `key_dim` is the
    number of channels that queries and keys are projected to (None: for "taylor2" half of the head's, from 16 to 32;
    else all), `convolution` the width of the short convolution before causal attention (0: none), and `decay` gives
    causal linear heads one per head and token. Cross-attention gets none of these but the projection.

    Raises ValueError, by name, for what no method of ours can replace, and where no layer would change."""
    check_sizes(window=window, convolution=convolution, least=0)
    check_sizes(**given(key_dim=key_dim))
    if not isinstance(method, str) or not isinstance(decay, bool) or not isinstance(keep, Collection):
        raise ValueError(
            "method must be a name, decay true or false, and keep a collection of layers, but they are "
            f"{method!r}, {decay!r} and {keep!r}"
        )
    check_sizes(keep=tuple(keep), least=0)
    if linearized_layers(model):
        raise ValueError(
            "the model is linearized already: undo that first, or plan with the model that it was made from"
        )
    calls: dict[str, Attended] = {}
    batch = model.dummy_inputs if batch is None else batch
    with attending_by(model, SOFTMAX):
        observe(model, batch, lambda call: calls.update({call.name: calls.get(call.name, call)}))
    if unknown := sorted(set(keep) - set(range(len(calls)))):
        raise ValueError(f"keep has {unknown}, but the model's layers are 0 to {len(calls) - 1}")
    layers = []
    for index, call in enumerate(calls.values()):
        spec = _spec(call, index, method=method, window=window, key_dim=key_dim)
        if call.causal and call.dim is not None:
            spec = replace(spec, convolution=convolution, decay=decay)
        module = model.get_submodule(call.name)
        layers.append(_layer(module, call, spec, "kept" if index in keep else _obstacle(module, call)))
    made = Plan(method, tuple(layers))
    if not made.replaced:
        reasons = "; ".join(sorted({str(layer.reason) for layer in layers})) or "no attention ran"
        raise ValueError(f"{type(model).__name__} has no layer that linattn could replace: {reasons}")
    return made


def _spec(call: Attended, index: int, *, method: str, window: int, key_dim: int | None) -> LayerSpec:
    d = call.q.shape[-1]
    least, most = TAYLOR_CHANNELS
    if key_dim is None and "taylor2" in method and d > least:
        key_dim = max(least, min(most, d // 2))
    return LayerSpec(
        index=index,
        method=method,
        window=window,
        key_dim=None if key_dim == d else key_dim,
        convolution=0,
        decay=False,
        num_heads=call.q.shape[1],
        num_key_heads=call.k.shape[1],
        head_dim=d,
        dim=call.dim or 0,
        causal=call.causal,
    )


def _obstacle(module: nn.Module, call: Attended) -> str | None:
    """Return why the layer cannot or need not be replaced."""
    if call.sliding_window is not None:
        return f"linear already, with its sliding window of {call.sliding_window}"
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"{type(module).__name__} hands nothing more to its attention than it knows, so no gates"
    return None


def module_sizes(module: nn.Module) -> tuple[str, ...]:
    """Describe the whole numbers that a module holds, such as its heads, and the shapes of its weights."""
    numbers = [f"{name} {value}" for name, value in vars(module).items() if type(value) is int]
    return (*numbers, *(f"{name} {tuple(weight.shape)}" for name, weight in module.named_parameters()))


def _layer(module: nn.Module, call: Attended, spec: LayerSpec, reason: str | None) -> LayerPlan:
    cached, sizes = call.k.shape[1] * (call.k.shape[-1] + call.v.shape[-1]), module_sizes(module)
    if reason is None:
        try:
            own = LinearizedAttention(spec)
        except ValueError as error:
            reason = str(error)
        else:
            weights, numbers = sum(weight.numel() for weight in own.parameters()), _state_numbers(own, call.v.shape[-1])
            return LayerPlan(spec.index, call.name, spec, None, weights, numbers, cached, sizes)
    return LayerPlan(spec.index, call.name, None, reason, 0, 0, cached, sizes)


def _state_numbers(own: LinearizedAttention, value_dim: int) -> int:
    """Count the numbers of the state after a window of tokens, from when on no state but softmax's grows."""
    numbers, spec = 0, own.spec

    def count(x: Tensor) -> Tensor:
        nonlocal numbers
        numbers += x.numel()
        return x

    n, hk = max(spec.window, 1), spec.num_key_heads
    q, k = torch.zeros(1, spec.num_heads, n, spec.head_dim), torch.zeros(1, hk, n, spec.head_dim)
    v = torch.zeros(1, hk, n, value_dim)
    with torch.no_grad():
        _, gates = own.prepare(torch.zeros(1, n, spec.dim), None, None)
        map_state(count, own.extend(q, k, v, gates=gates)[1] if spec.causal else own.summarize(k, v))
    return numbers + max(spec.convolution - 1, 0) * spec.dim
