"""The plan of a conversion: which layers of a stock model become linear, by which attention, and at which cost."""

import inspect
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linattn.attention.named import names_in
from linattn.checks import check_sizes, given
from linattn.linearize.attention import LayerSpec, LinearizedAttention, linearized_layers
from linattn.linearize.calls import SOFTMAX, AttentionCall, Batch, attention_function, observe
from linattn.ops.nested import map_state

TAYLOR_CHANNELS = 16, 32
"""Second-order Taylor features keep half of a head's channels, at least and at most these: φ has 153 numbers for 16
channels and 561 for 32."""


@dataclass(frozen=True)
class LayerPlan:
    """Describes the attention module `name`, the `index`-th that the model runs.

    `spec` describes its replacement, which has `new_weights`; None means that the module stays, for the `reason`. Its
    state holds `state_numbers` per sequence, the cache of keys and values `cache_numbers` per token. `sizes` are the
    whole numbers and the shapes of weights in the module, by which `convert` recognizes it."""

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
    """Holds what `convert` does with each of the `layers`; `method` is the name of the new attention."""

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
    window: int = 32,
    key_dim: int | None = None,
    convolution: int = 4,
    decay: bool = True,
) -> Plan:
    """Run the model on a `batch` (None: its own dummy inputs) and plan to replace each attention that runs, except
    those whose indices are in `keep`, by `method`, a name as in `named_attention`.

    Local heads see `window` tokens; a method without local heads gets a window of softmax beside it (0: no window).
    `key_dim` is the number of channels that queries and keys are projected to (None: for "taylor2" half of the head's,
    from 16 to 32; else no projection), `convolution` the width of the short convolution before causal attention (0: no
    convolution). With `decay`, causal linear heads have one decay per token. Cross-attention has the projection only.

    Raises ValueError, with the name of the module or option, for attention that no method of ours can replace, and
    where no layer would change."""
    check_sizes(window=window, convolution=convolution, least=0)
    check_sizes(**given(key_dim=key_dim))
    if not isinstance(method, str) or not isinstance(decay, bool) or not isinstance(keep, Collection):
        raise ValueError(
            "method must be a name, decay true or false, and keep a collection of layers, but they are "
            f"{method!r}, {decay!r} and {keep!r}"
        )
    check_sizes(keep=tuple(keep), least=0)
    names_in(method)
    if linearized_layers(model):
        raise ValueError(
            "the model is linearized already: undo that first, or plan with the model that it was made from"
        )
    calls: dict[str, AttentionCall] = {}
    with attention_function(model, SOFTMAX):
        inputs = model.dummy_inputs if batch is None else batch
        observe(model, inputs, lambda call: calls.update({call.name: calls.get(call.name, call)}))
    if unknown := sorted(set(keep) - set(range(len(calls)))):
        raise ValueError(f"keep has {unknown}, but the model's layers are 0 to {len(calls) - 1}")
    layers = []
    for index, call in enumerate(calls.values()):
        spec = _spec(call, index, method, window, key_dim, convolution, decay)
        layers.append(_layer(call, spec, "kept" if index in keep else _obstacle(call)))
    if all(layer.spec is None for layer in layers):
        reasons = "; ".join(sorted({str(layer.reason) for layer in layers})) or "no attention ran"
        raise ValueError(f"{type(model).__name__} has no layer that linattn could replace: {reasons}")
    return Plan(method, tuple(layers))


def _spec(
    call: AttentionCall, index: int, method: str, window: int, key_dim: int | None, convolution: int, decay: bool
) -> LayerSpec:
    (h, _, d), hk = call.q.shape[1:], call.k.shape[1]
    least, most = TAYLOR_CHANNELS
    if key_dim is None and "taylor2" in method and d > least:
        key_dim = max(least, min(most, d // 2))
    key_dim = None if key_dim == d else key_dim
    if not call.causal or call.dim is None:
        convolution, decay = 0, False
    return LayerSpec(index, method, window, key_dim, convolution, decay, h, hk, d, call.dim or 0, call.causal)


def _obstacle(call: AttentionCall) -> str | None:
    """Return why the layer cannot or need not be replaced."""
    if call.sliding_window is not None:
        return f"linear already, with its sliding window of {call.sliding_window}"
    parameters = inspect.signature(call.module.forward).parameters
    if "hidden_states" not in parameters:
        return f"{type(call.module).__name__} takes no hidden_states"
    if inspect.Parameter.VAR_KEYWORD not in [parameter.kind for parameter in parameters.values()]:
        return f"{type(call.module).__name__} hands nothing more to its attention than it knows, so no gates"
    return None


def module_sizes(module: nn.Module) -> tuple[str, ...]:
    """Return the whole numbers among a module's attributes, such as its heads, and the shapes of its weights."""
    numbers = [f"{name} {value}" for name, value in vars(module).items() if type(value) is int]
    return (*numbers, *(f"{name} {tuple(weight.shape)}" for name, weight in module.named_parameters()))


def _layer(call: AttentionCall, spec: LayerSpec, reason: str | None) -> LayerPlan:
    cached, sizes = call.k.shape[1] * (call.k.shape[-1] + call.v.shape[-1]), module_sizes(call.module)
    if reason is None:
        try:
            own = LinearizedAttention(spec)
        except ValueError as error:
            reason = str(error)
        else:
            weights, numbers = sum(weight.numel() for weight in own.parameters()), _state_numbers(own, call.v.shape[-1])
            return LayerPlan(spec.index, call.name, spec, None, weights, numbers, cached, sizes)
    return LayerPlan(spec.index, call.name, None, reason, 0, 0, cached, sizes)


@torch.no_grad()
def _state_numbers(own: LinearizedAttention, value_dim: int) -> int:
    """Return the number of entries in a linear layer's state, for values of `value_dim`, once its window is full."""
    spec, counts = own.spec, [max(own.spec.convolution - 1, 0) * own.spec.dim]
    n, hk = max(spec.window, 1), spec.num_key_heads
    q, k = torch.zeros(1, spec.num_heads, n, spec.head_dim), torch.zeros(1, hk, n, spec.head_dim)
    v = torch.zeros(1, hk, n, value_dim)
    _, gates = own.prepare(torch.zeros(1, n, spec.dim), None, None)
    state = own.extend(q, k, v, gates=gates)[1] if spec.causal else own.summarize(k, v)
    map_state(lambda x: counts.append(x.numel()), state)
    return sum(counts)
