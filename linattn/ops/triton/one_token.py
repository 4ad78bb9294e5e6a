"""A single token: one kernel, whose launch is planned once for all calls with the same shapes and strides.

In generation all calls are alike. A plan follows from shapes, strides and the dtype alone, and is cached: computing it
takes longer than the kernel."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.triton.launch import Inputs, Rows, as_pointers
from linattn.ops.triton.layout import empty_outputs
from linattn.ops.triton.step_kernel import step
from linattn.ops.triton.support import on_device_of
from linattn.ops.triton.tiling import Split, step_tiles

# shape and strides
Layout = tuple[torch.Size, tuple[int, ...]]


class Plan(NamedTuple):
    """A launch without its tensors: shape and strides of y, the grid, and all other arguments."""

    y: tuple[torch.Size, tuple[int, ...]]
    grid: tuple[int]
    options: dict[str, Any]


def forward(call: CausalCall) -> tuple[Tensor, ...]:
    q, k, v, S, z, log_decay, key_mask, normalize, feature_map, _ = call
    tensors = q, k, v, S, z, log_decay, key_mask
    layouts = tuple([x if x is None else (x.shape, x.stride()) for x in tensors])
    plan = _cached_plan(layouts, q.dtype, normalize, feature_map)
    if plan is None:
        inputs, S, z = readable_call(call)
        plan, (q, k, v) = _plan(inputs, z), inputs.tokens.values()
        log_decay, key_mask = inputs.log_decay, inputs.key_mask
    y = q.new_empty_strided(*plan.y)
    S_end, z_end = torch.empty_like(S), torch.empty_like(z)
    if plan.grid[0]:
        tokens, states = (q, k, v, y), ((S, z), (S_end, z_end))
        with on_device_of(q):
            step[plan.grid](tokens, as_pointers(q, key_mask, log_decay), states, (), **plan.options)
    return y, S_end, z_end


def readable_call(call: CausalCall) -> tuple[Inputs, Tensor, Tensor]:
    """Return the kernels' view of a call, with a row per leading index of the queries, and the call's S and z."""
    q, k, v, S, z, log_decay, key_mask, normalize, feature_map, *_ = call
    tokens, normalized = {"q": q, "k": k, "v": v}, normalize == "output"
    inputs = Inputs(call.lead, tokens, v.shape[-1], feature_map, normalized, key_mask, log_decay)
    return inputs, S.contiguous(), z.contiguous()


def _plan(inputs: Inputs, z: Tensor) -> Plan:
    y, tiles = empty_outputs(inputs.tokens["q"], inputs.lead, inputs.dv), step_tiles(inputs.f, inputs.dv)
    rows = Rows(inputs, [*inputs.tokens.values(), y], z)
    return Plan((y.shape, y.stride()), *rows.arguments(tiles, Split(1, 1), [rows.shared(z, z).strides] * 2, 1))


@lru_cache(maxsize=1024)
def _cached_plan(
    layouts: tuple[Layout | None, ...], dtype: torch.dtype, normalize: str | None, feature_map: str
) -> Plan | None:
    """Return the plan for tensors of these shapes and strides, or None if some of them must be copied first. `dtype` is
    that of the tokens; no plan depends on the dtypes of other tensors."""
    tensors = [x if x is None else torch.empty_strided(*x, dtype=dtype, device="meta") for x in layouts]
    inputs, S, z = readable_call(CausalCall(*tensors, normalize, feature_map, False))  # type: ignore[arg-type]
    views = *inputs.tokens.values(), S, z, inputs.log_decay, inputs.key_mask
    return _plan(inputs, z) if all(a is b for a, b in zip(views, tensors, strict=True)) else None
