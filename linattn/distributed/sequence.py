"""Sequence parallel: each process holds a part of every sequence, and the state that the parts before it leave behind.

What goes over the wires is a state per layer, whatever the length. There are two ways to get it: the `wave` and the
`scan`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from linattn.attention.base import InnerAttention
from linattn.checks import given
from linattn.distributed.layers import Layers, layers_with_states, without_segment
from linattn.distributed.parts import Group, process_group
from linattn.distributed.scan import gathered
from linattn.distributed.segments import position_segment, segment
from linattn.distributed.transport import Line
from linattn.distributed.wave import carried
from linattn.models.token_model import TokenModel
from linattn.names import unknown_name
from linattn.nn import MultiheadAttention
from linattn.nn.attention import AttentionState
from linattn.nn.residual import ReversibleSequence, Stack
from linattn.ops.nested import map_state, tensors_in

ENGINES = ("wave", "scan")


@dataclass
class SequenceSharding:
    """Records the changes of `shard_sequence` to a model: the `engine`, "wave" or "scan", with the `reason` for it, and
    the names of the `layers` whose states go from rank to rank along the `line` of the group."""

    engine: str
    reason: str
    layers: list[str]
    line: Line = field(repr=False)
    _changes: list[Callable[[], object]] = field(init=False, repr=False, default_factory=list)

    def undo(self) -> None:
        """Restore the model's own methods, after all messages have been received."""
        self.line.finish()
        for undo in reversed(self._changes):
            undo()
        self._changes = []

    def undo_by(self, undo: Callable[[], object]) -> None:
        """Let the function `undo` take back a change of the model."""
        self._changes.append(undo)

    def replace(self, owner: Any, name: str, attribute: Any) -> None:
        """Put `attribute`, such as a method, in the place of the owner's own of this name."""
        own = vars(owner).get(name)
        self.undo_by(partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own))
        setattr(owner, name, attribute)

    def exchange(
        self,
        extend: Callable[[Tensor, Any], tuple[Tensor, Any]],
        x: Tensor,
        state: Any,
        own: Callable[[], Any] | None,
        name: str,
    ) -> tuple[Tensor, Any]:
        """Return extend(x, past), where the past is the state that the ranks before leave, and `state` is the one
        before their tokens. `own`, which the wave does not need, returns the segment of this rank's tokens. `name`
        names the layer in errors."""
        if self.engine == "wave" or own is None:
            return carried(self.line, extend, x, state, name)
        return extend(*gathered(self.line, own(), x, state))

    def __str__(self) -> str:
        return f"{len(self.layers)} layers by {self.engine} over {self.line.size} ranks: {self.reason}"


def shard_sequence(
    model: nn.Module, group: Group, *, engine: str | None = None, timeout: float | None = None
) -> SequenceSharding:
    """Make the `model` take one part of each sequence per rank of the `group`, in place: from the tokens of rank r,
    which follow those of rank r − 1, it makes the outputs that they have in the whole sequence. Gradients are those of
    the whole sequence too, if each rank differentiates its part (`sequence_loss`) and they are averaged over the ranks,
    for instance by DDP or FSDP. Parts may differ in length. The result's `undo()` takes the changes back.

    The model is one of ours, has our layers in it, or is one of transformers after `speed_up`, or with our attention;
    the latter get positions, and take no cache and no labels. `extend` takes a state that all ranks have, and returns,
    on the last rank, the state after all tokens, which `last_state` gives to all.

    The `group` is a mesh of one dimension, or a process group. The `engine` is "wave", a pipeline without further
    products, which takes every causal layer; or "scan", where all ranks are at the same layer, which takes our layers.
    None takes the wave, unless parameters are sharded over the same ranks (call `fully_shard` first). A
    rank that waits longer than `timeout` seconds (None: the group's limit) raises a RuntimeError that says why.

    Raises ValueError, on every rank, for layers that are not causal, see all tokens at once, or cannot hand on a
    state."""
    if engine is not None and engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    line = Line(process_group(group), timeout)
    chosen, reason, layers, problem = "", "", Layers({}, []), ""
    try:
        layers = layers_with_states(model)
        chosen, reason = _engine(model, layers, line, engine)
        for name, layer in layers.own.items():
            if "extend" in vars(layer):
                raise ValueError(f"{name or 'the model'} is sharded already: call undo() of what that returned")
    except ValueError as error:
        problem = str(error)
    dtypes = ", ".join(sorted({str(x.dtype) for x in model.parameters()}))
    kind = type(model).__name__
    line.agree(f"{kind} with {len(layers.names)} layers by {chosen} and parameters of {dtypes}", problem)
    sharding = SequenceSharding(chosen, reason, layers.names, line)
    for name, layer in layers.own.items():
        _hand_on(sharding, name or type(model).__name__, layer)
    for each in layers.foreign:
        each.install(sharding)
    for name, module in model.named_modules():
        _prepare(sharding, name, module)
    for name in ("forward", "extend", "hidden", "extend_hidden"):
        if hasattr(model, name):
            sharding.replace(model, name, _compared(line, model, getattr(model, name)))
    return sharding


def _engine(model: nn.Module, layers: Layers, line: Line, engine: str | None) -> tuple[str, str]:
    """Return the engine and the reason for it. Raise ValueError if a layer has no map for the scan."""
    unknown = [type(part).__name__ for part in map(without_segment, layers.own.values()) if part is not None]
    unknown += ["layers of another library"] if layers.foreign else []
    if engine == "scan" and unknown:
        raise ValueError(f"the scan has no map of a segment for {unknown[0]}: take engine='wave'")
    if engine is not None:
        return engine, "as was asked for"
    if not unknown and any(_shares_ranks(parameter, line) for parameter in model.parameters()):
        return "scan", "parameters are sharded over the same ranks, which meet at each layer anyway"
    return "wave", "no layer waits for all ranks"


def _shares_ranks(parameter: nn.Parameter, line: Line) -> bool:
    """Tell whether a parameter is sharded over ranks of the group."""
    if not isinstance(parameter, DTensor):
        return False
    own = set(dist.get_process_group_ranks(line.group))
    groups = [parameter.device_mesh.get_group(dim) for dim, x in enumerate(parameter.placements) if x.is_shard()]
    return any(len(own.intersection(dist.get_process_group_ranks(group))) > 1 for group in groups)


def _hand_on(sharding: SequenceSharding, name: str, layer: Any) -> None:
    """Let a layer begin with the state that the ranks before leave."""
    own_extend, is_attention = layer.extend, isinstance(layer, InnerAttention)
    axis = 2 if is_attention else 1

    def extend(inputs: tuple[Tensor, ...], state: Any, options: dict[str, Any]) -> tuple[Tensor, Any]:
        def after(x: Tensor, past: Any) -> tuple[Tensor, Any]:
            return own_extend(x, *inputs[1:], past, **options)

        def own() -> Any:
            tokens, known = inputs[1:] if is_attention else inputs, options
            if sharding.line.is_last:
                # nobody reads its segment
                tokens, known = _no_tokens(tokens, axis), {key: _no_tokens(x, axis) for key, x in options.items()}
            return segment(layer, *tokens, **known)

        # an empty tensor stands for inputs that a convolution gets from the ranks before, see `_hand_on_positions`
        state = None if isinstance(state, Tensor) and not state.numel() else state
        return sharding.exchange(after, inputs[0], state, own, name)

    _replace_calls(sharding, layer, 3 if is_attention else 1, extend)


def _no_tokens(inputs: Any, axis: int) -> Any:
    return map_state(lambda x: x.narrow(min(axis, x.ndim - 1), 0, 0), inputs)


def _replace_calls(
    sharding: SequenceSharding, layer: Any, count: int, extended: Callable[[Any, Any, Any], tuple[Tensor, Any]]
) -> None:
    """Put extended(inputs, state, options) in the place of `extend` and `forward` of a layer with `count` inputs."""
    own_forward = layer.forward

    def extend(*arguments: Any, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        return extended(arguments[:count], arguments[count] if len(arguments) > count else state, options)

    def forward(*inputs: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        if len(inputs) > count or context is not None:
            # the layer's own method refuses a context
            return own_forward(*inputs, **options, **given(context=context))
        return extend(*inputs, **options)[0]

    # messages are no part of a graph: a compiler breaks it here
    sharding.replace(layer, "extend", torch.compiler.disable(extend))
    sharding.replace(layer, "forward", torch.compiler.disable(forward))


def _prepare(sharding: SequenceSharding, name: str, module: Any) -> None:
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
    if isinstance(module, MultiheadAttention) and module.rotary is not None and not module.is_cross_attention:
        _hand_on_positions(sharding, name, module)


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


def _hand_on_positions(sharding: SequenceSharding, name: str, layer: Any) -> None:
    """Let rotary positions begin after the present tokens of the ranks before."""
    own_extend = layer.extend

    def extend(inputs: tuple[Tensor, ...], state: Any, options: dict[str, Any]) -> tuple[Tensor, Any]:
        (x,), own, position = inputs, position_segment(inputs[0], **options), None

        def count(x: Tensor, past: Any) -> tuple[Tensor, Any]:
            nonlocal position
            position = past
            return x, own.after(past)

        x, _ = sharding.exchange(count, x, None if state is None else state.position, lambda: own, f"{name}.rotary")
        if state is None and position is not None:
            none = x[:, :0]
            none = (none,) * 3 if layer.convolution_on == "projections" else none
            state = AttentionState(None, None if layer.convolution is None else none, None)
        return own_extend(x, None if state is None else state._replace(position=position), **options)

    _replace_calls(sharding, layer, 1, extend)


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
    tensors = tensors_in((arguments, tuple(options.values())))
    rows = "no tensors" if not tensors else f"{tensors[0].shape[0]} rows of {tensors[0].dtype}"
    given = [name for name, x in options.items() if x is not None]
    mode = "training" if model.training else "evaluation"
    gradients = "with" if torch.is_grad_enabled() else "without"
    return f"{rows}, {', '.join(given) or 'no options'}, {mode} {gradients} gradients"
