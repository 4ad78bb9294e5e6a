"""The wave: a layer begins with the state that the rank before has after its own call of the layer.

Rank 0 is one layer ahead of rank 1, and so on, as in a pipeline, so that no layer waits for all ranks: L layers on P
ranks take the time of L + P − 1 layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn.distributed.transport import (
    Format,
    Line,
    is_learned,
    leaves_of,
    num_bytes,
    packed,
    receive_leaves,
    send_leaves,
    unpacked,
    with_leaves,
)


def carried(
    line: Line,
    extend: Callable[[Tensor, Any], tuple[Tensor, Any]],
    x: Tensor,
    state: Any,
    empty: Any,
    *,
    grows: bool,
    what: str,
) -> tuple[Tensor, Any]:
    """Return extend(x, past), where the past is `state` on the first rank, and on the others the state that the rank
    before has after its own call. Send the new state on.

    `empty` is a state of no tokens, which shows what a message consists of; `grows` tells whether sizes depend on the
    tokens. `what` names the layer in errors."""
    # the gradient of a state goes back even where no input has one: a rank would wait for ever for one that never comes
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled(), device=x.device)
    form = Format(leaves_of(empty), grows)
    past = state
    if not line.is_first:
        x, *leaves = _Arrival.apply(line, form, what, x, anchor)
        past = with_leaves(empty, leaves)
    y, after = extend(x, past)
    if not line.is_last:
        y = _Departure.apply(line, form, what, y, anchor, *leaves_of(after))
    return y, after


class _Arrival(torch.autograd.Function):
    """x, and the state of the rank before. As one function returns both, the backward pass from x also sends the
    gradient of the state back."""

    @staticmethod
    def forward(ctx: Any, line: Line, form: Format, what: str, x: Tensor, anchor: Tensor) -> tuple[Any, ...]:
        leaves = receive_leaves(line, line.rank - 1, form, x.device, f"the state of {what}")
        ctx.line, ctx.learned = line, [is_learned(leaf) for leaf in leaves]
        ctx.mark_non_differentiable(*(x for x in leaves if isinstance(x, Tensor) and not is_learned(x)))
        return x.view_as(x), *leaves

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, *grads: Any) -> tuple[Any, ...]:  # type: ignore[override]
        own = [grad for grad, learned in zip(grads, ctx.learned, strict=True) if learned]
        if own:
            ctx.line.send(packed(own), ctx.line.rank - 1)
        return None, None, None, dx, None


class _Departure(torch.autograd.Function):
    """y, after the state was sent on; the gradient of the state comes back with that of y."""

    @staticmethod
    def forward(ctx: Any, line: Line, form: Format, what: str, y: Tensor, anchor: Tensor, *leaves: Any) -> Tensor:
        send_leaves(line, line.rank + 1, form, leaves, y.device)
        ctx.line, ctx.what = line, what
        ctx.metas = [torch.empty_like(leaf, device="meta") if is_learned(leaf) else None for leaf in leaves]
        # reading it makes activation checkpointing compute, and send, again, before this rank waits
        ctx.save_for_backward(y.new_empty(0))
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        line, grads = ctx.line, ctx.metas
        if num_bytes(grads):
            buffer = torch.empty(num_bytes(grads), dtype=torch.uint8, device=dy.device)
            what = f"the gradient of the state of {ctx.what}"
            grads = unpacked(line.receive(buffer, line.rank + 1, what), grads)
        return None, None, None, dy, None, *grads
