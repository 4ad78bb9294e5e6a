"""The scan: all ranks are at the same layer. Each computes the map of its tokens from state to state (`segments`),
gathers those of all ranks, and applies the maps of the ranks before it, in order, to the state before the first one.

It takes more products than the wave (`linattn.distributed.wave`), in which each rank is behind the one before it, but
ranks may do something else together at each layer, as FSDP does over the same ranks. LASP-2, https://arxiv.org/abs/2502.07563."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn.distributed.transport import Line, is_learned
from linattn.ops.nested import tensors_in, with_tensors


def gathered(line: Line, own: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return x and the state before this rank's tokens. `own` is the segment of this rank's tokens; `state` is the
    state before the tokens of the first rank, the same on all ranks."""
    # as every rank waits for the gradients of the others, x takes part even where no input has one
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled(), device=x.device)
    tensors, segments = tensors_in(own), line.gather_states(own)
    longest = max(sum(y.numel() for y in tensors_in(each) if is_learned(y)) for each in segments)
    before = [y.to(x.device) for each in segments[: line.rank] for y in tensors_in(each)]
    x, *before = _Gathering.apply(line, (len(tensors), longest), x, anchor, *tensors, *before)
    for rank, each in enumerate(segments[: line.rank]):
        state = with_tensors(each, before[rank * len(tensors) :][: len(tensors)]).after(state)
    return x, state


class _Gathering(torch.autograd.Function):
    """x, and the tensors of the segments of the ranks before. It is one function of x and of this rank's segment, so
    that all ranks take part in the exchange of gradients, also the first, which reads no segment, and the last, which
    nobody reads. `sizes` are the number of tensors of a segment, and of the learned numbers in the longest one."""

    @staticmethod
    def forward(
        ctx: Any, line: Line, sizes: tuple[int, int], x: Tensor, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        own, before = tensors[: sizes[0]], tensors[sizes[0] :]
        ctx.line, ctx.sizes, ctx.learned = line, sizes, [is_learned(y) for y in own]
        ctx.forms = [torch.empty_like(y, device="meta") for y in own if is_learned(y)]
        ctx.mark_non_differentiable(*(y for y in before if not is_learned(y)))
        return x.view_as(x), *before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        line, (count, longest) = ctx.line, ctx.sizes
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in ctx.forms) else torch.float32
        rows = torch.zeros(line.size, longest, dtype=dtype, device=line.device)
        for rank in range(line.rank if longest else 0):
            of_rank = zip(grads[rank * count :], ctx.learned, strict=False)
            flat = torch.cat([grad.reshape(-1) for grad, learned in of_rank if learned])
            rows[rank, : len(flat)] = flat
        line.bytes_sent += longest * rows.element_size()
        total = torch.empty_like(rows[0])
        if longest:
            dist.reduce_scatter(total, [*rows], group=line.group)
        sizes = [x.numel() for x in ctx.forms]
        parts = total[: sum(sizes)].to(dx.device).split(sizes)
        own = iter([part.view(x.shape).to(x.dtype) for part, x in zip(parts, ctx.forms, strict=True)])
        mine = (next(own) if learned else None for learned in ctx.learned)
        return None, None, dx, None, *mine, *(None for _ in grads)
