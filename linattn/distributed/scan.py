"""The scan: all ranks are at the same layer. Each computes the map of its tokens from state to state (`segments`),
gathers those of all ranks, and applies the maps of the ranks before it, in order, to the state before the first one.

It takes more products than the wave, but ranks may do something else together at each layer, as FSDP does over the same
ranks. LASP-2, https://arxiv.org/abs/2502.07563."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn.distributed.segments import SoftmaxSegment
from linattn.distributed.transport import (
    Line,
    header_of,
    is_learned,
    leaves_of,
    num_bytes,
    packed,
    tensors_in,
    unpacked,
    with_leaves,
    with_sizes,
)
from linattn.ops.nested import map_state


def gathered(line: Line, own: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return x and the state before this rank's tokens. `own` is the segment of this rank's tokens; `state` is the
    state before the tokens of the first rank, the same on all ranks."""
    # as every rank waits for the gradients of the others, x takes part even where no input has one
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled(), device=x.device)
    fold = _Fold(line, own, state)
    x, *leaves = _Gathering.apply(fold, x, anchor, *leaves_of(own), *leaves_of(state))
    return x, state if line.is_first else with_leaves(fold.past, leaves)


class _Fold:
    """Applies the segments of the ranks before, in order, to a state. `segments` has the leaves of each of these
    segments, and `past` the state after them, whose nested tuples show how its leaves belong together."""

    def __init__(self, line: Line, own: Any, state: Any):
        self.line, self.own, self.state = line, own, state
        self.segments = list[list[Any]]()
        self.past: Any = None

    def gather(self, leaves: list[Any]) -> None:
        """Send the leaves of this rank's segment to all ranks, and keep the leaves of the segments of the ranks
        before."""
        line, metas = self.line, [leaves] * self.line.size
        if _grows(self.own):
            device = next(x.device for x in tensors_in(leaves))
            metas = [with_sizes(leaves, header) for header in line.gather(header_of(leaves).to(device))]
        sizes, own = [num_bytes(meta) for meta in metas], packed(leaves)
        # segments that grow may differ in length
        buffers = line.gather(F.pad(own, (0, max(sizes) - len(own))))[: line.rank]
        self.segments = [unpacked(x[:size], meta) for x, size, meta in zip(buffers, sizes, metas, strict=False)]

    def __call__(self, segments: list[list[Any]], state: list[Any]) -> list[Any]:
        """Apply these `segments`, in order, to `state`. Segments and states are lists of leaves; return those of the
        new state."""
        past = with_leaves(self.state, state)
        for leaves in segments:
            past = with_leaves(self.own, leaves).after(past)
        self.past = past
        return leaves_of(past)


class _Gathering(torch.autograd.Function):
    """x, and the state before this rank's tokens. It is one function of both, and of the segment, so that all ranks
    take part in the exchange of gradients, also the first, which reads no segment, and the last, whose segment no
    rank reads."""

    @staticmethod
    def forward(ctx: Any, fold: _Fold, x: Tensor, anchor: Tensor, *leaves: Any) -> tuple[Any, ...]:
        count = len(leaves_of(fold.own))
        own, state = list(leaves[:count]), list(leaves[count:])
        fold.gather(own)
        ctx.fold, ctx.own = fold, [torch.empty_like(x, device="meta") if is_learned(x) else None for x in own]
        ctx.options = [None if isinstance(x, Tensor) else x for x in state]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in state))
        if fold.line.is_first:
            return (x.view_as(x),)
        past = fold(fold.segments, state)
        ctx.mark_non_differentiable(*(x for x in past if isinstance(x, Tensor) and not is_learned(x)))
        return x.view_as(x), *past

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, *grads: Any) -> tuple[Any, ...]:  # type: ignore[override]
        fold, line = ctx.fold, ctx.fold.line
        segments = [[_differentiable(x) for x in leaves] for leaves in fold.segments]
        state = [_differentiable(x) for x in ctx.saved_tensors]
        state = [option if x is None else x for x, option in zip(state, ctx.options, strict=True)]
        inputs = [x for leaves in (*segments, state) for x in leaves if is_learned(x)]
        found = iter([None] * len(inputs))
        if not line.is_first:
            with torch.enable_grad():
                past = fold(segments, state)
            pairs = [(x, grad) for x, grad in zip(past, grads, strict=True) if is_learned(x) and x.requires_grad]
            outputs, upstream = [x for x, _ in pairs], [grad for _, grad in pairs]
            found = iter(torch.autograd.grad(outputs, inputs, upstream, allow_unused=True) if outputs else found)
        dsegments = [[_gradient(x, found) for x in leaves if is_learned(x)] for leaves in segments]
        dstate = [_gradient(x, found) if is_learned(x) else None for x in state]
        own = iter(_summed(line, dsegments, [x for x in ctx.own if x is not None], _grows(fold.own)))
        return None, dx, None, *(None if x is None else next(own) for x in ctx.own), *dstate


def _summed(line: Line, grads: list[list[Tensor]], own: list[Tensor], grows: bool) -> list[Tensor]:
    """Send the gradients `grads` of the segments of the ranks before to these ranks. Return those of this rank's
    segment, summed over the ranks, in the shapes of `own`. If `grows`, the segments of other ranks may be larger."""
    if not own:
        return []
    device = grads[0][0].device if grads else line.group_device
    exact = torch.float64 if any(x.dtype == torch.float64 for x in own) else torch.float32
    count = longest = sum(x.numel() for x in own)
    if grows:
        longest = int(max(x.item() for x in line.gather(torch.tensor([count], device=device))))
    rows = torch.zeros(line.size, longest, dtype=exact, device=device)
    for row, tensors in zip(rows, grads, strict=False):
        flat = torch.cat([x.reshape(-1).to(exact) for x in tensors])
        row[: len(flat)] = flat
    line.bytes_sent += longest * rows.element_size()
    mine = torch.empty(longest, dtype=exact, device=device)
    dist.reduce_scatter(mine, list(rows), group=line.group)
    parts = mine[:count].split([x.numel() for x in own])
    return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, own, strict=True)]


def _grows(own: Any) -> bool:
    """Tell whether the size of a segment grows with the number of its tokens."""
    found: list[Any] = []
    map_state(found.append, own, leaf=SoftmaxSegment)
    return bool(found)


def _differentiable(x: Any) -> Any:
    return x.detach().requires_grad_() if is_learned(x) else x


def _gradient(x: Tensor, found: Any) -> Tensor:
    grad = next(found)
    return torch.zeros_like(x) if grad is None else grad
