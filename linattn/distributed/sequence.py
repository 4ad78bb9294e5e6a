"""Sequence parallel: each process holds a part of every sequence, and the state that the parts before it leave behind.

What goes over the wires is a state per layer, whatever the length. There are two ways to get it: the `wave` and the
`scan`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from linattn.attention.base import InnerAttention
from linattn.distributed.layers import layers_with_states, without_segment
from linattn.distributed.parts import Group, process_group
from linattn.distributed.scan import gathered
from linattn.distributed.segments import position_segment, segment
from linattn.distributed.transport import Line, leaves_of, tensors_in
from linattn.distributed.wave import carried
from linattn.models.token_model import TokenModel
from linattn.names import unknown_name
from linattn.nn import MultiheadAttention
from linattn.nn.attention import AttentionState
from linattn.nn.modes import evaluating
from linattn.nn.residual import ReversibleSequence, Stack
from linattn.ops.nested import map_state

ENGINES = ("wave", "scan")


@dataclass
class SequenceSharding:
    """Records the changes of `shard_sequence` to a model: the `engine`, "wave" or "scan", with the `reason` for it, and
    the names of the `layers` whose states go from rank to rank along the `line` of the group."""

    engine: str
    reason: str
    layers: list[str]
    line: Line = field(repr=False)
    _before: list[tuple[nn.Module, str, Any]] = field(init=False, repr=False, default_factory=list)

    def undo(self) -> None:
        """Restore the model's own methods, after all messages have been received."""
        self.line.finish()
        for module, name, attribute in reversed(self._before):
            delattr(module, name) if attribute is None else setattr(module, name, attribute)
        self._before = []

    def replace(self, module: nn.Module, name: str, attribute: Any) -> None:
        """Put `attribute`, such as a method, in the place of the module's own of this name."""
        self._before.append((module, name, vars(module).get(name)))
        setattr(module, name, attribute)

    def __str__(self) -> str:
        return f"{len(self.layers)} layers by {self.engine} over {self.line.size} ranks: {self.reason}"


def shard_sequence(
    model: nn.Module, group: Group, *, engine: str | None = None, timeout: float | None = None
) -> SequenceSharding:
    """Make the `model` take one part of each sequence per rank of the `group`, in place: from the tokens of rank r,
    which follow those of rank r − 1, it makes the outputs that they have in the whole sequence. Gradients are those of
    the whole sequence too, if each rank differentiates its part (`sequence_loss`) and they are averaged over the ranks,
    for instance by DDP or FSDP. Parts may differ in length. The result's `undo()` takes the changes back.

    The model is one of ours, or has our layers in it. `extend` takes a state that all ranks have, and returns, on the
    last rank, the state after all tokens, which `last_state` gives to all.

    The `group` is a mesh of one dimension, or a process group. The `engine` is "wave", a pipeline without further
    products, which takes every causal layer; or "scan", where all ranks are at the same layer. None takes the wave,
    unless parameters are sharded over the same ranks (call `fully_shard` first) or the ranks outnumber the layers. A
    rank that waits longer than `timeout` seconds (None: the group's limit) raises a RuntimeError that says why.

    Raises ValueError, on every rank, for layers that are not causal, see all tokens at once, or cannot hand on a
    state."""
    if engine is not None and engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    line = Line(process_group(group), timeout)
    chosen, reason, layers, problem = "", "", dict[str, nn.Module](), ""
    try:
        chosen, reason = _engine(model, line, engine)
        layers = layers_with_states(model, composed=chosen == "wave")
        obstacle = next(filter(None, map(without_segment, layers.values())), None) if chosen == "scan" else None
        if obstacle is not None:
            raise ValueError(f"the scan has no map of a segment for {type(obstacle).__name__}: take engine='wave'")
        for name, layer in layers.items():
            if "extend" in vars(layer):
                raise ValueError(f"{name or 'the model'} is sharded already: call undo() of what that returned")
    except ValueError as error:
        problem = str(error)
    for rank, other in enumerate(line.descriptions(problem)):
        if other:
            raise ValueError(problem or f"rank {rank}: {other}")
    dtypes = ", ".join(sorted({str(x.dtype) for x in model.parameters()}))
    line.agree(f"{type(model).__name__} with {len(layers)} layers by {chosen} and parameters of {dtypes}")
    sharding = SequenceSharding(chosen, reason, list(layers), line)
    for name, layer in layers.items():
        (_carry if chosen == "wave" else _gather)(sharding, name or type(model).__name__, layer)
    for module in model.modules():
        _prepare(sharding, module)
    for name in ("forward", "extend", "hidden", "extend_hidden"):
        if hasattr(model, name):
            sharding.replace(model, name, _compared(line, model, getattr(model, name)))
    return sharding


def _engine(model: nn.Module, line: Line, engine: str | None) -> tuple[str, str]:
    """Return the engine and the reason for it."""
    if engine is not None:
        return engine, "as was asked for"
    if any(_shares_ranks(parameter, line) for parameter in model.parameters()):
        return "scan", "parameters are sharded over the same ranks, which meet at each layer anyway"
    layers = layers_with_states(model, composed=True)
    if line.size > len(layers) and not any(map(without_segment, layers_with_states(model, composed=False).values())):
        return "scan", "a wave does not gain from more ranks than layers"
    return "wave", "no layer waits for all ranks"


def _shares_ranks(parameter: nn.Parameter, line: Line) -> bool:
    """Tell whether a parameter is sharded over ranks of the group."""
    if not isinstance(parameter, DTensor):
        return False
    own = set(dist.get_process_group_ranks(line.group))
    groups = [parameter.device_mesh.get_group(dim) for dim, x in enumerate(parameter.placements) if x.is_shard()]
    return any(len(own.intersection(dist.get_process_group_ranks(group))) > 1 for group in groups)


def _carry(sharding: SequenceSharding, name: str, layer: Any) -> None:
    """Let the state of a layer come from the rank before, and go on to the next."""
    own_extend, examples = layer.extend, dict[Any, Any]()
    count, axis = (3, 2) if isinstance(layer, InnerAttention) else (1, 1)

    def extend(inputs: tuple[Tensor, ...], state: Any, options: dict[str, Any]) -> tuple[Tensor, Any]:
        with evaluating(layer):
            # dropout would draw numbers
            empty, grows = _example(examples, own_extend, inputs, options, axis)
        x, *others = inputs

        def after(x: Tensor, past: Any) -> tuple[Tensor, Any]:
            return own_extend(x, *others, past, **options)

        return carried(sharding.line, after, x, state, empty, grows=grows, what=name)

    _replace_calls(sharding, layer, count, extend)


def _gather(sharding: SequenceSharding, name: str, layer: Any) -> None:
    """Let a layer begin with the state after the tokens of all ranks before, which the ranks' segments give."""
    own_extend, line = layer.extend, sharding.line
    count, axis = (3, 2) if isinstance(layer, InnerAttention) else (1, 1)

    def extend(inputs: tuple[Tensor, ...], state: Any, options: dict[str, Any]) -> tuple[Tensor, Any]:
        known, x = options, inputs[0]
        tokens = inputs[1:] if count == 3 else inputs
        if line.is_last:
            # nobody reads its segment
            tokens, known = (_first(y, axis, 0) for y in (tokens, options))
        x, past = gathered(line, segment(layer, *tokens, **known), x, state)
        return own_extend(x, *inputs[1:], past, **options)

    _replace_calls(sharding, layer, count, extend)


def _replace_calls(
    sharding: SequenceSharding, layer: Any, count: int, extended: Callable[[Any, Any, Any], tuple[Tensor, Any]]
) -> None:
    """Put extended(inputs, state, options) in the place of `extend` and `forward` of a layer with `count` inputs."""
    own_forward = layer.forward

    def extend(*arguments: Any, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        return extended(arguments[:count], arguments[count] if len(arguments) > count else state, options)

    def forward(*inputs: Tensor, **options: Any) -> Tensor:
        if len(inputs) > count or options.pop("context", None) is not None:
            # a context, which the layer's own method refuses
            return own_forward(*inputs, **options)
        return extend(*inputs, **options)[0]

    # messages are no part of a graph: a compiler breaks it here
    sharding.replace(layer, "extend", torch.compiler.disable(extend))
    sharding.replace(layer, "forward", torch.compiler.disable(forward))


def _example(
    known: dict[Any, Any], extend: Any, inputs: tuple[Tensor, ...], options: dict[str, Any], axis: int
) -> tuple[Any, bool]:
    """Return a state after no tokens, and whether a state after one token has other sizes. Results are kept in
    `known`."""
    everything = tensors_in([*inputs, *leaves_of(tuple(options.values()))])
    device = inputs[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    key = tuple((*x.shape[:axis], *x.shape[axis + 1 :], x.dtype) for x in everything), tuple(options), autocast
    if key not in known:
        with torch.no_grad():
            states = [extend(*_first(inputs, axis, n), None, **_first(options, axis, n))[1] for n in (0, 1)]
        sizes = [[getattr(leaf, "shape", leaf) for leaf in leaves_of(state)] for state in states]
        known[key] = states[0], sizes[0] != sizes[1]
    return known[key]


def _first(inputs: Any, axis: int, n: int) -> Any:
    """Return the first n tokens, or all if there are fewer, of all tensors in a tuple or dictionary."""
    if isinstance(inputs, dict):
        return {name: _first(x, axis, n) for name, x in inputs.items()}
    return map_state(lambda x: x.narrow(min(axis, x.ndim - 1), 0, min(n, x.shape[min(axis, x.ndim - 1)])), inputs)


def _prepare(sharding: SequenceSharding, module: Any) -> None:
    """Let positions count the tokens of the ranks before, keep a stack from packing tokens, and make a reversible
    sequence run `extend` in the place of `forward`."""
    if isinstance(module, ReversibleSequence):
        # not reversed: that would repeat what ranks say to each other
        sharding.replace(module, "forward", lambda *inputs, **options: module.extend(*inputs, **options)[0])
    if isinstance(module, Stack):
        # what stands behind packed tokens would be part of the state
        sharding.replace(module, "packs", False)
    if isinstance(module, TokenModel) and module.positions is not None:
        sharding.replace(module, "embed", _with_positions(sharding.line, module.embed))
    scans = sharding.engine == "scan" and isinstance(module, MultiheadAttention)
    if scans and module.rotary is not None and not module.is_cross_attention:
        _gather_positions(sharding, module)


def _with_positions(line: Line, embed: Callable[..., Any]) -> Callable[..., Any]:
    """Let positions begin after the present tokens of the ranks before. All ranks exchange their numbers of tokens at
    the same time, because under FSDP each of them holds a part of the embedding."""

    def embed_later(
        tokens: Tensor, position: Tensor | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        present = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask
        before = torch.stack(line.gather(present.sum(1)))[: line.rank].sum(0)
        return embed(tokens, before if position is None else before + position, key_mask=key_mask)

    return embed_later


def _gather_positions(sharding: SequenceSharding, layer: Any) -> None:
    own_extend, line = layer.extend, sharding.line

    def extend(inputs: tuple[Tensor, ...], state: Any, options: dict[str, Any]) -> tuple[Tensor, Any]:
        (x,) = inputs
        x, position = gathered(line, position_segment(x, **options), x, None if state is None else state.position)
        if position is None:
            return own_extend(x, None, **options)
        past = AttentionState(None, _no_inputs(layer, x), None) if state is None else state
        return own_extend(x, past._replace(position=position), **options)

    _replace_calls(sharding, layer, 1, extend)


def _no_inputs(layer: Any, x: Tensor) -> Any:
    """Return the state of a layer's convolutions before any input."""
    if layer.convolution is None:
        return None
    projected, device = layer.convolution_on == "projections", x.device.type
    dtype = torch.get_autocast_dtype(device) if projected and torch.is_autocast_enabled(device) else x.dtype
    parts = layer.convolution.parts if projected else [layer.convolution]
    zeros = [x.new_zeros(len(x), y.weight.shape[0] - 1, y.weight.shape[1], dtype=dtype) for y in parts]
    return tuple(zeros) if projected else zeros[0]


def _compared(line: Line, model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Let every rank raise an error if they call the model in different ways: otherwise some would wait for others."""

    def call(*arguments: Any, **options: Any) -> Any:
        if line.is_busy:
            return method(*arguments, **options)
        line.is_busy = True
        try:
            line.agree(_described(model, arguments, options))
            return method(*arguments, **options)
        finally:
            line.is_busy = False

    return call


def _described(model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    tensors = tensors_in([*leaves_of(arguments), *leaves_of(tuple(options.values()))])
    rows = "no tensors" if not tensors else f"{tensors[0].shape[0]} rows of {tensors[0].dtype}"
    given = [name for name, x in options.items() if x is not None]
    mode = "training" if model.training else "evaluation"
    gradients = "with" if torch.is_grad_enabled() else "without"
    return f"{rows}, {', '.join(given) or 'no options'}, {mode} {gradients} gradients"
