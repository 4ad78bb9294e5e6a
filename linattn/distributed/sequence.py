"""Sequence parallel: each process holds a part of every sequence, and the state that the parts before it leave behind.

Each causal layer of a rank begins with the state that the rank before has after its own call of the layer, so what goes
over the wires is a state per layer, whatever the length. No layer waits for all ranks: rank 0 is one layer ahead of rank
1, and so on, as in a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from linattn.attention.base import InnerAttention
from linattn.distributed.transport import (
    Format,
    Line,
    carried,
    header_of,
    joined,
    leaves_of,
    num_bytes,
    parted,
    receive_leaves,
    send_leaves,
    tensors_in,
    with_leaves,
    with_sizes,
)
from linattn.models.language_model import Block
from linattn.models.loss import NO_LABEL
from linattn.models.token_model import TokenModel
from linattn.nn import GatedConvolution, MultiheadAttention, ShortConvolution, TokenShift
from linattn.nn.branch import Branch
from linattn.nn.residual import ReversibleSequence, Stack
from linattn.ops.nested import map_state
from linattn.types import TokenIds, TokenMask

Group = DeviceMesh | dist.ProcessGroup


class SequencePart(NamedTuple):
    """The tokens of one rank, and the labels for their logits; `key_mask` is None if all tokens are present."""

    tokens: TokenIds
    labels: TokenIds
    key_mask: TokenMask = None


def split_sequence(
    tokens: TokenIds, labels: TokenIds | None = None, *, group: Group, key_mask: TokenMask = None
) -> SequencePart:
    """Return this rank's part of `tokens` (b, n), which all ranks of the `group` have whole, and its labels.

    The label of a token is the token, or the number in `labels`, at the next place: it may be on the next rank, so it is
    moved before the sequence is cut. The last token, and one whose next place is masked, has `NO_LABEL`, −100.

    Raises ValueError unless the number of ranks divides n."""
    line = Line(process_group(group))
    labels = tokens if labels is None else labels
    n = tokens.shape[1]
    if labels.shape != tokens.shape:
        raise ValueError(f"labels must be as the tokens, {tuple(tokens.shape)}, but are {tuple(labels.shape)}")
    if n % line.size:
        raise ValueError(f"the number of ranks, {line.size}, must divide that of tokens, but there are {n}")
    if key_mask is not None:
        labels = labels.masked_fill(~key_mask, NO_LABEL)
    part = slice(line.rank * n // line.size, (line.rank + 1) * n // line.size)
    targets = F.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
    return SequencePart(tokens[:, part], targets[:, part], None if key_mask is None else key_mask[:, part])


def sequence_loss(logits: Float[Tensor, "b n v"], labels: TokenIds, *, group: Group) -> Float[Tensor, ""]:
    """Return the mean cross entropy of the labels of all ranks, each with its own `logits`; labels that are `NO_LABEL`
    do not count. The value is the same on every rank.

    Its gradients are those of this rank's tokens, times the number of ranks: averaged over the ranks, as DDP and FSDP
    do, they are those of the whole sequence."""
    line = Line(process_group(group))
    exact = logits.float() if logits.element_size() < 4 else logits
    total = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
    sums = torch.stack([total.detach().double(), (labels != NO_LABEL).sum().double()])
    dist.all_reduce(sums, group=line.group)
    count = sums[1].clamp(min=1).to(total.dtype)
    own = total * line.size / count
    return own + (sums[0].to(total.dtype) / count - own).detach()


def last_state(state: Any, *, group: Group) -> Any:
    """Return, on every rank of the `group`, the `state` that `extend` returned on the last one: that after all tokens.
    It has no gradient."""
    line = Line(process_group(group))
    leaves = leaves_of(state)
    device = next((x.device for x in tensors_in(leaves)), line.group_device)
    header = header_of(leaves).to(device)
    dist.broadcast(header, group=line.group, group_src=line.size - 1)
    metas = with_sizes(leaves, header)
    sizes = tensors_in(metas)
    buffer = joined(tensors_in(leaves)) if line.is_last else torch.empty(num_bytes(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=line.group, group_src=line.size - 1)
    tensors = iter(parted(buffer, sizes))
    return with_leaves(state, [next(tensors) if isinstance(x, Tensor) else x for x in metas])


@dataclass
class SequenceSharding:
    """Records the changes of `shard_sequence` to a model. `layers` has the name of each layer whose state goes from
    rank to rank."""

    engine: str
    layers: list[str]
    line: Line = field(repr=False)
    _before: list[tuple[nn.Module, str, Any]] = field(init=False, repr=False, default_factory=list)

    def undo(self) -> None:
        """Give the model its own methods back. Messages that nobody has received are waited for."""
        self.line.finish()
        for module, name, method in reversed(self._before):
            delattr(module, name) if method is None else setattr(module, name, method)
        self._before = []

    def replace(self, module: nn.Module, name: str, method: Any) -> None:
        """Put `method`, or another attribute, in the place of the module's own of this name."""
        self._before.append((module, name, vars(module).get(name)))
        setattr(module, name, method)

    def __str__(self) -> str:
        return f"{len(self.layers)} layers in a {self.engine} over {self.line.size} ranks"


def shard_sequence(model: nn.Module, group: Group, *, timeout: float | None = None) -> SequenceSharding:
    """Make the `model` take one part of each sequence per rank of the `group`, in place: with the tokens of rank r, which
    follow those of rank r − 1, it returns the outputs of these tokens in the whole sequence. Gradients are those of the
    whole sequence, too, if each rank differentiates its part (`sequence_loss`) and they are averaged or summed over the
    ranks, for instance by DDP or FSDP. Parts may differ in length.

    The model is one of ours, or has our layers in it. `extend` goes on after a state that the first rank holds; what it
    returns is the state after all tokens on the last rank, and `last_state` gives it to all. Call `undo()` of what
    is returned for a model that generates from that state by itself.

    The `group` is a mesh of one dimension, or a process group. A rank that waits longer than `timeout` seconds (None:
    the group's own limit) raises a RuntimeError that says for what.

    Raises ValueError, on every rank, for layers that are not causal, that see all tokens at once, or have no rule."""
    line = Line(process_group(group), timeout)
    names, problem = [], ""
    try:
        names = [name for name, module in _modules(model) if _has_state(name, module)]
        if not names:
            raise ValueError(f"{type(model).__name__} has no causal layer of linattn, so there is nothing to hand on")
    except ValueError as error:
        problem = str(error)
    for rank, other in enumerate(line.descriptions(problem)):
        if other:
            raise ValueError(problem or f"rank {rank}: {other}")
    dtypes = sorted({str(x.dtype) for x in model.parameters()})
    line.agree(f"{type(model).__name__} with {len(names)} causal layers, parameters of {', '.join(dtypes)}")
    sharding = SequenceSharding("wave", names, line)
    modules = dict(model.named_modules())
    for name in names:
        _shard(sharding, name or type(model).__name__, modules[name])
    for module in modules.values():
        _shard_holder(sharding, module)
    _compare_calls(sharding, model)
    return sharding


def process_group(group: Group) -> dist.ProcessGroup:
    """Return the process group of a mesh of one dimension, or the group itself."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names
        raise ValueError(f"a mesh of one dimension is needed, as mesh[{(names or ('name',))[0]!r}], but it has {group.ndim}")
    return group.get_group()


# what mixes tokens in ways that no state of ours holds
_MIXES_TOKENS = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
)
# what only passes on the states of its parts
_LISTS = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_HOLDERS = (TokenModel, Block, Stack, Branch)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of the model by name, without the parts of layers whose state is handed on as a whole."""
    found: list[tuple[str, nn.Module]] = []
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if any(module is other for _, other in found):
            continue
        found.append((name, module))
        if not isinstance(module, (MultiheadAttention, GatedConvolution, InnerAttention)):
            children = [(f"{name}.{child}".lstrip("."), part) for child, part in module.named_children()]
            stack.extend(reversed(children))
    return found


def _has_state(name: str, module: nn.Module) -> bool:
    """Tell whether the module has a state to hand on. Raise ValueError if it cannot be, or has no rule."""
    where = f"{name or 'the model'}, a {type(module).__name__},"
    if isinstance(module, MultiheadAttention) and module.is_cross_attention:
        return False
    inner = module.inner if isinstance(module, MultiheadAttention) else module
    if isinstance(inner, InnerAttention) and not inner.causal:
        raise ValueError(f"{where} is not causal: its tokens see those of later ranks")
    if isinstance(module, TokenShift) and module.future:
        raise ValueError(f"{where} looks ahead, at tokens of the next rank")
    if isinstance(module, _MIXES_TOKENS):
        raise ValueError(f"{where} sees more than one token, and its state is not handed on between ranks")
    known = isinstance(module, (MultiheadAttention, InnerAttention, ShortConvolution, GatedConvolution, TokenShift))
    if not known and hasattr(module, "extend") and not isinstance(module, (*_HOLDERS, *_LISTS)):
        raise ValueError(f"{where} has a state of its own, for which there is no rule")
    return known


def _shard(sharding: SequenceSharding, name: str, layer: Any) -> None:
    """Let the state of a layer come from the rank before, and go on to the next."""
    own_forward, own_extend, examples = layer.forward, layer.extend, {}
    count = 3 if isinstance(layer, InnerAttention) else 1
    axis = 2 if count == 3 else 1

    def extend(*arguments: Any, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        inputs, state = arguments[:count], arguments[count] if len(arguments) > count else state
        empty, grows = _example(examples, own_extend, inputs, options, axis)
        x, *others = inputs
        call = lambda x, past: own_extend(x, *others, past, **options)  # noqa: E731
        return carried(sharding.line, call, x, state, empty, grows=grows, what=name)

    def forward(*inputs: Tensor, **options: Any) -> Tensor:
        context = len(inputs) > count or options.pop("context", None) is not None
        # which the layer's own method refuses
        return own_forward(*inputs, **options) if context else extend(*inputs, **options)[0]

    sharding.replace(layer, "extend", extend)
    # the forward of convolutions is extend already
    if not isinstance(layer, (ShortConvolution, GatedConvolution)):
        sharding.replace(layer, "forward", forward)


def _example(known: dict[Any, Any], extend: Any, inputs: Any, options: Any, axis: int) -> tuple[Any, bool]:
    """Return a state of no tokens, and whether that of one has other sizes."""
    x, masks = inputs[0], [y for y in leaves_of(tuple(options.values())) if isinstance(y, Tensor)]
    autocast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    key = tuple((y.shape[:axis], y.dtype) for y in (x, *masks)), autocast
    if key not in known:

        def after(n: int) -> Any:
            cut = {name: map_state(lambda y: y.narrow(_tokens(y, axis), 0, n), y) for name, y in options.items()}
            return extend(*(y.narrow(axis, 0, n) for y in inputs), None, **cut)[1]

        with torch.no_grad():
            # a rank may hold no token at all
            empty, one = after(0), after(min(1, x.shape[axis]))
        known[key] = empty, [_shape(y) for y in leaves_of(empty)] != [_shape(y) for y in leaves_of(one)]
    return known[key]


def _tokens(x: Tensor, axis: int) -> int:
    return min(axis, x.ndim - 1)


def _shape(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf


def _shard_holder(sharding: SequenceSharding, module: Any) -> None:
    """Let positions go on from the rank before, and a model begin with them."""
    if isinstance(module, ReversibleSequence):
        # not reversed: that would repeat what ranks say to each other
        sharding.replace(module, "forward", lambda *inputs, **options: module.extend(*inputs, **options)[0])
    if isinstance(module, Stack):
        # what stands behind packed tokens would be part of the state
        sharding.replace(module, "packs", False)
    if isinstance(module, TokenModel) and module.positions is not None:
        sharding.replace(module, "embed", _carrying_positions(sharding.line, module.embed))


def _carrying_positions(line: Line, embed: Callable[..., Any]) -> Callable[..., Any]:
    def embed_later(tokens: Tensor, position: Tensor | None = None, **options: Any) -> tuple[Tensor, Any]:
        form = Format([torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)], grows=False)
        if not line.is_first:
            (position,) = receive_leaves(line, line.rank - 1, form, tokens.device, "the positions")
        x, after = embed(tokens, position, **options)
        if not line.is_last:
            send_leaves(line, line.rank + 1, form, [after], tokens.device)
        return x, after

    return embed_later


def _compare_calls(sharding: SequenceSharding, model: Any) -> None:
    """Let every rank raise an error if they call the model in different ways: otherwise some would wait for others."""
    inside = [False]

    def compared(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if inside[0]:
                return method(*arguments, **options)
            inside[0] = True
            try:
                sharding.line.agree(_described(model, arguments, options))
                return method(*arguments, **options)
            finally:
                inside[0] = False

        return call

    for name in ("forward", "extend", "hidden", "extend_hidden"):
        if hasattr(model, name):
            sharding.replace(model, name, compared(getattr(model, name)))


def _described(model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    tensors = tensors_in([*leaves_of(arguments), *leaves_of(tuple(options.values()))])
    rows = "no tensors" if not tensors else f"{tensors[0].shape[0]} rows of {tensors[0].dtype}"
    given = [name for name, x in options.items() if x is not None]
    mode = "training" if model.training else "evaluation"
    gradients = "with" if torch.is_grad_enabled() else "without"
    return f"{rows}, {', '.join(given) or 'no options'}, {mode} {gradients} gradients"
