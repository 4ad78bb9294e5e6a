"""The wave: a part of a layer that has a state begins with the one that the rank before has after its own call.

As in a pipeline, rank 1 is behind rank 0 by one such part, for instance an attention without its projections, rank 2 by
two, and so on, so that no layer waits for all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn.distributed.transport import Line, is_learned, num_bytes, packed, unpacked
from linattn.ops.nested import tensors_in, with_tensors


def carried(
    line: Line, extend: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor, state: Any, what: str
) -> tuple[Tensor, Any]:
    """Return extend(x, past), where the past is `state` on the first rank, and on the others the state that the rank
    before has after its own call. Send the new state on. `what` names the layer in errors."""
    # the gradient of a state goes back even where no input has one: a rank would wait for ever for one that never comes
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled(), device=x.device)
    past = state
    if not line.is_first:
        received = line.receive_state(line.rank - 1, what)
        x, *tensors = _Arrival.apply(line, x, anchor, *(y.to(x.device) for y in tensors_in(received)))
        past = with_tensors(received, tensors)
    y, after = extend(x, past)
    if not line.is_last:
        line.send_state(after, line.rank + 1, what)
        y = _Departure.apply(line, what, y, anchor, *tensors_in(after))
    return y, after


class _Arrival(torch.autograd.Function):
    """x, and the state of the rank before. As one function returns both, the backward pass from x also sends the
    gradient of the state back."""

    @staticmethod
    def forward(ctx: Any, line: Line, x: Tensor, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.line, ctx.learned = line, [is_learned(y) for y in tensors]
        ctx.mark_non_differentiable(*(y for y in tensors if not is_learned(y)))
        return x.view_as(x), *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        own = [grad for grad, learned in zip(grads, ctx.learned, strict=True) if learned]
        message = packed(own).to(ctx.line.device)
        # nobody receives the gradient of a state without numbers, as that of softmax after no token
        if len(message):
            ctx.line.send(message, ctx.line.rank - 1)
        return None, dx, None, *(None for _ in grads)


class _Departure(torch.autograd.Function):
    """y, after the state was sent on; the gradient of the state comes back with that of y."""

    @staticmethod
    def forward(ctx: Any, line: Line, what: str, y: Tensor, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.line, ctx.what = line, what
        ctx.forms = [torch.empty_like(x, device="meta") if is_learned(x) else None for x in tensors]
        # reading it makes activation checkpointing compute, and send, again, before this rank waits
        ctx.save_for_backward(y.new_empty(0))
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        line, learned = ctx.line, [x for x in ctx.forms if x is not None]
        buffer = torch.empty(num_bytes(learned), dtype=torch.uint8, device=line.device)
        if len(buffer):
            line.receive(buffer, line.rank + 1, f"the gradient of the state of {ctx.what}")
        grads = iter(unpacked(buffer.to(dy.device), learned))
        return None, None, dy, None, *(None if x is None else next(grads) for x in ctx.forms)
