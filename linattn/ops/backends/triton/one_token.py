"""One token with the kernel of its own, prepared once for all calls that lie alike.

In generation each call lies as the one before it. What follows from shapes, strides and dtypes alone is kept, as
working it out takes longer than the kernel."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall
from linattn.ops.backends.triton.launch import Call, Rows
from linattn.ops.backends.triton.layout import States, Strided, empty_outputs
from linattn.ops.backends.triton.step_kernel import step
from linattn.ops.backends.triton.tiling import Split, step_tiles

# makes a named tuple in a third of the time that its constructor takes
_tuple: Any = tuple.__new__

# shape, strides and dtype
Lies = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Plan(NamedTuple):
    """A launch without its tensors: shape and strides of y, the grid, the integers that go with each tensor and with
    each state, and all other arguments."""

    y: tuple[torch.Size, tuple[int, ...]]
    grid: tuple[int]
    strides: dict[str, tuple[int, ...]]
    states: tuple[int, ...]
    constants: dict[str, Any]


def forward(given: CausalCall) -> tuple[Tensor, ...]:
    q, k, v, S, z, log_decay, key_mask, normalize, feature_map, _ = given
    tensors = q, k, v, S, z, log_decay, key_mask
    plan = _kept(tuple([x if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]), normalize, feature_map)
    if plan is None:
        call, S, z = readable_call(given)
        plan, (q, k, v), log_decay, key_mask = _plan(call, z), call.tokens.values(), call.log_decay, call.key_mask
    y = q.new_empty_strided(*plan.y)
    S_end, z_end = torch.empty_like(S), torch.empty_like(z)
    if plan.grid[0]:
        # a mask is read as bytes, and of what is absent nothing is read
        decay, mask = q if log_decay is None else log_decay, q if key_mask is None else key_mask.view(torch.uint8)
        named = zip(plan.strides.items(), (q, k, v, y, decay, mask), strict=True)
        described = {name: _tuple(Strided, (x, *strides)) for (name, strides), x in named}
        state, end = _tuple(States, (S, z, *plan.states)), _tuple(States, (S_end, z_end, *plan.states))
        with torch.cuda.device_of(q):
            step[plan.grid](**plan.constants, **described, state=state, end=end)
    return y, S_end, z_end


def readable_call(given: CausalCall) -> tuple[Call, Tensor, Tensor]:
    """Return the call, whose rows are those of the queries, and its state."""
    q, k, v, S, z, log_decay, key_mask, normalize, feature_map, *_ = given
    tokens, normalized = {"q": q, "k": k, "v": v}, normalize == "output"
    call = Call(given.lead, tokens, v.shape[-1], feature_map, normalized, key_mask, log_decay)
    return call, S.contiguous(), z.contiguous()


def _plan(call: Call, z: Tensor) -> Plan:
    y, tiles = empty_outputs(call.tokens["q"], call.lead, call.dv), step_tiles(call.f, call.dv)
    rows = Rows(call, {**call.tokens, "y": y}, z)
    grid, constants = rows.prepared(step, 1, Split(1, 1), **rows.arguments, **tiles._asdict())
    # in the order in which `forward` has them
    strides = {name: constants.pop(name)[1:] for name in ("q", "k", "v", "y", "log_decay", "key_mask")}
    return Plan((y.shape, y.stride()), grid, strides, rows.shared(z, z)[2:], constants)


@lru_cache(maxsize=1024)
def _kept(lies: tuple[Lies | None, ...], normalize: str | None, feature_map: str) -> Plan | None:
    """Return the plan for tensors that lie so, or None if some of them must be copied first."""
    tensors = [x if x is None else torch.empty_strided(*x[:2], dtype=x[2], device="meta") for x in lies]
    call, S, z = readable_call(CausalCall(*tensors, normalize, feature_map, False))  # type: ignore[arg-type]
    found = *call.tokens.values(), S, z, call.log_decay, call.key_mask
    return _plan(call, z) if all(a is b for a, b in zip(found, tensors, strict=True)) else None
