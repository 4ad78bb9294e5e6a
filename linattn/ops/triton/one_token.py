"""One token with the kernel of its own, prepared once for all calls that lie alike.

In generation each call lies as the one before it. What follows from shapes, strides and the dtype alone is kept, as
working it out takes longer than the kernel."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.triton.launch import Call, Rows, as_pointers
from linattn.ops.triton.layout import empty_outputs, on_device_of
from linattn.ops.triton.step_kernel import step
from linattn.ops.triton.tiling import Split, step_tiles

# shape and strides
Lies = tuple[torch.Size, tuple[int, ...]]


class Plan(NamedTuple):
    """A launch without its tensors: shape and strides of y, the grid, and all other arguments."""

    y: tuple[torch.Size, tuple[int, ...]]
    grid: tuple[int]
    options: dict[str, Any]


def forward(given: CausalCall) -> tuple[Tensor, ...]:
    q, k, v, S, z, log_decay, key_mask, normalize, feature_map, _ = given
    tensors = q, k, v, S, z, log_decay, key_mask
    lies = tuple([x if x is None else (x.shape, x.stride()) for x in tensors])
    plan = _kept(lies, q.dtype, normalize, feature_map)
    if plan is None:
        call, S, z = readable_call(given)
        plan, (q, k, v), log_decay, key_mask = _plan(call, z), call.tokens.values(), call.log_decay, call.key_mask
    y = q.new_empty_strided(*plan.y)
    S_end, z_end = torch.empty_like(S), torch.empty_like(z)
    if plan.grid[0]:
        tokens, states = (q, k, v, y), ((S, z), (S_end, z_end))
        with on_device_of(q):
            step[plan.grid](tokens, as_pointers(q, key_mask, log_decay), states, (), **plan.options)
    return y, S_end, z_end


def readable_call(given: CausalCall) -> tuple[Call, Tensor, Tensor]:
    """Return the call, whose rows are those of the queries, and its state."""
    q, k, v, S, z, log_decay, key_mask, normalize, feature_map, *_ = given
    tokens, normalized = {"q": q, "k": k, "v": v}, normalize == "output"
    call = Call(given.lead, tokens, v.shape[-1], feature_map, normalized, key_mask, log_decay)
    return call, S.contiguous(), z.contiguous()


def _plan(call: Call, z: Tensor) -> Plan:
    y, tiles = empty_outputs(call.tokens["q"], call.lead, call.dv), step_tiles(call.f, call.dv)
    rows = Rows(call, [*call.tokens.values(), y], z)
    return Plan((y.shape, y.stride()), *rows.prepared(tiles, Split(1, 1), [rows.shared(z, z).strides] * 2, 1))


@lru_cache(maxsize=1024)
def _kept(lies: tuple[Lies | None, ...], dtype: torch.dtype, normalize: str | None, feature_map: str) -> Plan | None:
    """Return the plan for tensors that lie so, or None if some of them must be copied first. The dtype is that of
    tokens, and no other one changes a plan."""
    tensors = [x if x is None else torch.empty_strided(*x, dtype=dtype, device="meta") for x in lies]
    call, S, z = readable_call(CausalCall(*tensors, normalize, feature_map, False))  # type: ignore[arg-type]
    found = *call.tokens.values(), S, z, call.log_decay, call.key_mask
    return _plan(call, z) if all(a is b for a, b in zip(found, tensors, strict=True)) else None
