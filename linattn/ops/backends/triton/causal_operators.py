"""The causal operator with the kernels, its gradient, and one token at a time with the kernel of its own."""

from typing import Any

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall
from linattn.ops.backends.operator import Tensors
from linattn.ops.backends.triton import causal_gradient_kernels as gradient_kernels
from linattn.ops.backends.triton import causal_kernels as kernels
from linattn.ops.backends.triton import launch as host
from linattn.ops.backends.triton.launch import (
    Arguments,
    Denominators,
    Splits,
    arguments,
    launch,
    with_denominators,
)
from linattn.ops.backends.triton.layout import empty_like_tokens, readable, readable_scalars
from linattn.ops.backends.triton.maps import MAPS
from linattn.ops.backends.triton.split_kernels import key_sums, query_sums
from linattn.ops.backends.triton.step_kernel import step as step_kernel
from linattn.ops.backends.triton.tiling import (
    PRECISION,
    Tiles,
    over_both,
    over_queries,
    over_values,
    split,
    step_tiles,
)


class _Call:
    """A causal call made readable for kernels. Its rows are those of the queries."""

    def __init__(self, call: CausalCall) -> None:
        q, k, v, S, z, log_decay, key_mask, normalize, feature_map, *_ = call
        self.lead, self.n, self.f, self.dv = q.shape[:-2], q.shape[-2], q.shape[-1], v.shape[-1]
        self.q, self.k, self.v = (readable(x, self.lead) for x in (q, k, v))
        self.S, self.z = S.contiguous(), z.contiguous()
        self.log_decay, self.key_mask = (readable_scalars(x, self.lead) for x in (log_decay, key_mask))
        # gradients of what serves several rows are summed in float32
        self.k_is_shared, self.v_is_shared = (x.shape[:-2] != self.lead for x in (k, v))
        self.normalized = normalize == "output"
        self.phi, self.derivative = MAPS[feature_map]
        self.dtype, self.device = q.dtype, q.device
        self.shape = (self.f, self.dv, self.dtype, self.device)

    def arguments(self, *outputs: Tensor) -> Arguments:
        """Make kernel arguments of q, k, v and these others."""
        wide = [self.q, self.k, self.v, *outputs]
        return arguments(self.lead, wide, self.key_mask, self.log_decay, self.z)

    def constants(self, args: Arguments) -> dict[str, Any]:
        return {
            "PHI": self.phi, "MASKED": self.key_mask is not None, "DECAYED": self.log_decay is not None,
            "PRECISION": PRECISION[self.dtype], "F": self.f, "DV": self.dv, "UNIT": args.unit,
        }  # fmt: skip

    def scalars(self, *lead: int, wanted: bool = True) -> Tensor:
        """Room for one number for each token, in float32."""
        return self.q.new_empty((*lead, self.n) if wanted else (0,), dtype=torch.float32)

    def states(self, args: Arguments, tiles: Tiles) -> tuple[list[object], int, int]:
        """Return where each program finds the state before its split, and the splits' length and number."""
        rows = args.rows
        length, splits = split(self.n, rows.number * tiles.parts, tiles.C, self.device)
        if splits == 1:
            return [self.S, self.z, *args.state, 0, self.f * self.dv, self.f], length, splits
        parts = Splits.empty(rows.number * splits, self.f, self.dv, self.q)
        by_values = over_values(*self.shape)
        _, k, v, *_ = args.wide
        launch(
            key_sums, (rows.number * splits, by_values.parts),
            [k, v, args.key_mask, args.log_decay, *parts.S_and_z, parts.whole, *parts.units,
             self.n, length, splits, rows.size1, rows.size2],
            by_values, **self.constants(args),
        )  # fmt: skip
        host.enter_splits(parts, splits, self.S, self.z, args, reverse=False, shared=True)
        return _split_states(parts, args, splits), length, splits


def _split_states(parts: Splits, args: Arguments, splits: int) -> list[object]:
    inner = args.rows.size2 * splits
    return [*parts.S_and_z, args.rows.size1 * inner, inner, splits, 1, *parts.units]


def forward(given: CausalCall, save: bool) -> tuple[Tensor, ...]:
    if given.q.shape[-2] == 1:
        return _step(given)
    call = _Call(given)
    y = empty_like_tokens(call.q, call.dv)
    S_end, z_end = torch.empty_like(call.S), torch.empty_like(call.z)
    if call.n == 0:
        return y, call.S.clone(), call.z.clone()
    args, tiles = call.arguments(y), over_values(*call.shape)
    states, length, splits = call.states(args, tiles)
    rows = args.rows
    launch(
        kernels.forward, (rows.number * splits, tiles.parts),
        [*args.wide, args.key_mask, args.log_decay, states, S_end, z_end, args.state,
         call.n, length, splits, rows.size1, rows.size2],
        tiles, NORMALIZED=call.normalized, **call.constants(args),
    )  # fmt: skip
    return y, S_end, z_end


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    q, _, v, S, z, *_ = call
    one = q.shape[-2] == 1
    y = v.new_empty(*q.shape[:-1], v.shape[-1]) if one else empty_like_tokens(readable(q, q.shape[:-2]), v.shape[-1])
    return y, torch.empty_like(S.contiguous()), torch.empty_like(z.contiguous())


def _empty_gradient(x: Tensor, lead: torch.Size, shared: bool) -> Tensor:
    """For the gradient of x in every row."""
    if not shared:
        return empty_like_tokens(x, x.shape[-1])
    return x.new_empty(*lead, *x.shape[-2:], dtype=torch.float32)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient if gradient.shape == x.shape else gradient.sum_to_size(*x.shape).to(x.dtype)


def gradient(given: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    call, (q, k, v, S, z, log_decay), (dy, dS_end, dz_end) = _Call(given), given[:6], grads
    assert dy is not None and dS_end is not None and dz_end is not None
    dy, dS_end, dz_end = readable(dy, call.lead), dS_end.contiguous(), dz_end.contiguous()
    if call.n == 0:
        of_decay = None if log_decay is None else torch.zeros_like(log_decay)
        zeros = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        return *zeros, dS_end.clone(), dz_end.clone(), of_decay, None
    dq, denominators, of_queries = _query_gradient(call, dy)
    dk, dv, dS, dz, of_keys = _key_gradients(call, dy, dS_end, dz_end, denominators)
    dlog_decay = None
    if log_decay is not None:
        change = of_keys.sum(1, dtype=torch.float64) - of_queries.sum(1, dtype=torch.float64)
        start = (S * dS).sum((-1, -2), dtype=torch.float64) + (z * dz).sum(-1, dtype=torch.float64)
        dlog_decay = _decay_gradient(log_decay, change.view(*call.lead, call.n), start)
    summed = (_summed(gradient, x) for gradient, x in ((dq, q), (dk, k), (dv, v), (dS, S), (dz, z)))
    return *summed, dlog_decay, None


def _decay_gradient(log_decay: Tensor, change: Tensor, start: Tensor) -> Tensor:
    """The decay at t weighs every pair of a query from t on and a key before t, and its gradient is the sum of theirs.
    For the first token these are the pairs with the given state; then each token's pairs with earlier keys leave the
    sum, and those with later queries enter it. The pair of a token with itself is in neither: among strong decays it is
    the largest by far, and would leave its rounding errors in all sums that follow."""
    shape = log_decay.shape
    change, start = change.sum_to_size(*shape), start.unsqueeze(-1).sum_to_size(*shape[:-1], 1)
    total = start + change.cumsum(-1) - change
    return total.masked_fill(log_decay == -torch.inf, 0).to(log_decay.dtype)


def _query_gradient(call: _Call, dy: Tensor) -> tuple[Tensor, Denominators, Tensor]:
    """dq, the denominators, and the sums over pairs with earlier keys."""
    dq, tiles = empty_like_tokens(call.q, call.f), over_queries(*call.shape)
    args = call.arguments(dy, dq)
    states, length, splits = call.states(args, tiles)
    rows = args.rows
    crossing = call.scalars(rows.number, tiles.parts, wanted=call.log_decay is not None)

    def run(denominators: Denominators, *, sums: bool, gradient: bool) -> None:
        launch(
            gradient_kernels.query_gradient, (rows.number * splits, tiles.parts),
            [*args.wide, args.key_mask, args.log_decay, states, *denominators, crossing,
             call.n, length, splits, rows.size1, rows.size2],
            tiles, DERIVATIVE=call.derivative, SUMS=sums, GRADIENT=gradient, NORMALIZED=call.normalized,
            **call.constants(args),
        )  # fmt: skip

    return dq, with_denominators(run, call.q, (rows.number, tiles.parts, call.n), call.normalized), crossing


def _key_gradients(
    call: _Call, dy: Tensor, dS_end: Tensor, dz_end: Tensor, denominators: Denominators
) -> tuple[Tensor, ...]:
    """dk, dv, dS, dz in every row, and the sums over pairs with later queries."""
    dk, dv = _empty_gradient(call.k, call.lead, call.k_is_shared), _empty_gradient(call.v, call.lead, call.v_is_shared)
    dS, dz = (x.new_empty(*call.lead, *x.shape[len(call.lead) :]) for x in (call.S, call.z))
    args = call.arguments(dy, dk, dv)
    rows, launches = args.rows, over_both(*call.shape)
    length, splits = split(call.n, rows.number * launches[0][0].parts, launches[0][0].C, call.device)
    states: list[object] = [dS_end, dz_end, *args.state, 0, call.f * call.dv, call.f]
    if splits > 1:
        parts = _entering_gradients(call, args, dS_end, dz_end, denominators, length, splits)
        states = _split_states(parts, args, splits)
    crossing = call.scalars(rows.number, launches[0][0].parts, wanted=call.log_decay is not None)
    for tiles, keys, values in launches:
        launch(
            gradient_kernels.key_gradients, (rows.number * splits, tiles.parts),
            [*args.wide, args.key_mask, args.log_decay, states, args.state, *denominators, crossing, dS, dz,
             call.n, length, splits, rows.size1, rows.size2],
            tiles, DERIVATIVE=call.derivative, KEYS=keys, VALUES=values, NORMALIZED=call.normalized,
            **call.constants(args),
        )  # fmt: skip
    return dk, dv, dS, dz, crossing


def _entering_gradients(
    call: _Call, args: Arguments, dS_end: Tensor, dz_end: Tensor, denominators: Denominators, length: int, splits: int
) -> Splits:
    """The gradients of the states after each split."""
    rows, tiles = args.rows, over_values(*call.shape)
    parts = Splits.empty(rows.number * splits, call.f, call.dv, call.q)
    q, _, _, dy, *_ = args.wide
    launch(
        query_sums, (rows.number * splits, tiles.parts),
        [q, dy, args.key_mask, args.log_decay, *denominators, *parts.S_and_z, parts.whole, *parts.units,
         call.n, length, splits, rows.size1, rows.size2],
        tiles, NORMALIZED=call.normalized, **call.constants(args),
    )  # fmt: skip
    host.enter_splits(parts, splits, dS_end, dz_end, args, reverse=True, shared=False)
    return parts


def empty_gradient(call: CausalCall) -> Tensors:
    q, k, v, S, z, log_decay, *_ = call
    lead = q.shape[:-2]

    def work(x: Tensor) -> Tensor:
        alone = x.shape[:-2] == lead and x.shape[-2] > 0
        return empty_like_tokens(readable(x, lead), x.shape[-1]) if alone else x.new_empty(x.shape)

    dlog_decay = None if log_decay is None else log_decay.new_empty(log_decay.shape)
    return work(q), work(k), work(v), S.new_empty(S.shape), z.new_empty(z.shape), dlog_decay, None


def _step(given: CausalCall) -> tuple[Tensor, ...]:
    call = _Call(given)
    y = call.v.new_empty(*call.lead, 1, call.dv)
    S_end, z_end = torch.empty_like(call.S), torch.empty_like(call.z)
    args, tiles = call.arguments(), step_tiles(call.f, call.dv)
    rows = args.rows
    if rows.number:
        q, k, v = (x[:4] for x in args.wide)
        with torch.cuda.device_of(call.q):
            step_kernel[rows.number, tiles.parts](
                *q, *k, *v, y, *args.key_mask[:4], *args.log_decay[:4], call.S, call.z, S_end, z_end, *args.state,
                rows.size1, rows.size2, PHI=call.phi, NORMALIZED=call.normalized, MASKED=call.key_mask is not None,
                DECAYED=call.log_decay is not None, F=call.f, DV=call.dv, BF=tiles.BF, BV=tiles.BV, UNIT=args.unit,
                num_warps=tiles.num_warps,
            )  # fmt: skip
    return y, S_end, z_end
