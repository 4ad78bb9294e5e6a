"""The causal operator with the kernels, its gradient, and one token at a time with the kernel of its own."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.operator import Tensors
from linattn.ops.triton import causal_gradient_kernels, causal_kernels, one_token
from linattn.ops.triton.decay_kernel import weigh
from linattn.ops.triton.launch import (
    Call,
    Rows,
    States,
    gradient_shape,
    in_words,
    launch_query_gradient,
    sum_splits,
    summed,
)
from linattn.ops.triton.layout import empty_outputs, readable
from linattn.ops.triton.one_token import readable_call
from linattn.ops.triton.split_kernels import key_sums, query_sums
from linattn.ops.triton.tiling import Split, over_both, over_queries, over_values


def _entering(rows: Rows, S: Tensor, z: Tensor, splits: Split) -> States:
    """Return the states before each split."""
    call, state = rows.call, rows.shared(S, z)
    if splits.number == 1:
        return state
    sums = sum_splits(call, key_sums, [call.tokens[name] for name in "kv"], splits)
    return rows.enter(state, sums, splits, REVERSE=False, SHARED=True)


def _weighed(given: CausalCall) -> tuple[Call, Tensor, Tensor]:
    """Return the call and its state. Of a decay, kernels read what `weigh` makes of it."""
    call, S, z = readable_call(given._replace(key_mask=in_words(given.key_mask)))
    if call.log_decay is not None:
        call.log_decay = weigh(call.log_decay, over_values(*call.shape).C)
    return call, S, z


def forward(given: CausalCall, save: bool) -> tuple[Tensor, ...]:
    if given.q.shape[-2] == 1:
        return one_token.forward(given)
    call, S, z = _weighed(given)
    y, S_end, z_end = empty_outputs(call.tokens["q"], call.lead, call.dv), torch.empty_like(S), torch.empty_like(z)
    rows, tiles = Rows(call, [*call.tokens.values(), y], z), over_values(*call.shape)
    splits = rows.split(tiles)
    rows.launch(causal_kernels.forward, tiles, splits, _entering(rows, S, z, splits), rows.shared(S_end, z_end))
    return y, S_end, z_end


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    y = empty_outputs(readable(call.q, call.lead), call.lead, call.v.shape[-1])
    return y, torch.empty_like(call.S.contiguous()), torch.empty_like(call.z.contiguous())


def gradient(given: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    (call, S, z), log_decay, (dy, dS_end, dz_end) = _weighed(given), given.log_decay, grads
    assert dy is not None and dS_end is not None and dz_end is not None
    dy = readable(dy, call.lead)
    dq, denominators, earlier = _query_gradient(call, S, z, dy)
    end = dS_end.contiguous(), dz_end.contiguous()
    *found, later = _key_gradients(call, dy, end, denominators)
    dlog_decay = None
    if log_decay is not None:
        dS, dz = found[2:]
        change = later.sum(1, dtype=torch.float64) - earlier.sum(1, dtype=torch.float64)
        start = (S * dS).sum((-1, -2), dtype=torch.float64) + (z * dz).sum(-1, dtype=torch.float64)
        dlog_decay = _decay_gradient(log_decay, change.view(*call.lead, call.n), start)
    return *(summed(g, x) for g, x in zip((dq, *found), given[:5], strict=True)), dlog_decay, None


def _decay_gradient(log_decay: Tensor, change: Tensor, start: Tensor) -> Tensor:
    """The decay at t weighs every pair of a query from t on and a key before t, and its gradient is the sum of theirs.
    For the first token these are the pairs with the given state; then each token's pairs with earlier keys leave the
    sum, and those with later queries enter it. The pair of a token with itself is in neither: among strong decays it is
    the largest by far, and would leave its rounding errors in all sums that follow."""
    shape = log_decay.shape
    change, start = change.sum_to_size(*shape), start.unsqueeze(-1).sum_to_size(*shape[:-1], 1)
    total = start + change.cumsum(-1) - change
    return total.masked_fill(log_decay == -torch.inf, 0).to(log_decay.dtype)


def _crossing(rows: Rows, programs: int) -> Tensor:
    """For the shares of a row's programs in the sums over pairs that a decay weighs."""
    call = rows.call
    return call.empty(0) if call.log_decay is None else call.empty(rows.number, programs, call.n)


def _query_gradient(call: Call, S: Tensor, z: Tensor, dy: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return dq, the denominators, and the sums over pairs with earlier keys."""
    dq, tiles = call.empty_gradient("q"), over_queries(*call.shape)
    rows = Rows(call, [*call.tokens.values(), dy, dq], z)
    splits, crossing = rows.split(tiles), _crossing(rows, tiles.parts)
    state = _entering(rows, S, z, splits)
    kernel = causal_gradient_kernels.query_gradient
    return dq, launch_query_gradient(rows, kernel, tiles, splits, state, [crossing]), crossing


def _key_gradients(
    call: Call, dy: Tensor, end: tuple[Tensor, Tensor], denominators: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Return dk, dv, dS and dz in every row, and the sums over pairs with later queries."""
    dk, dv = call.empty_gradient("k"), call.empty_gradient("v")
    dS, dz = call.empty(*call.lead, call.f, call.dv), call.empty(*call.lead, call.f)
    rows, launches = Rows(call, [*call.tokens.values(), dy, dk, dv], end[1]), over_both(*call.shape)
    tiles, *_ = launches[0]
    splits, dstate, crossing = rows.split(tiles), rows.shared(*end), _crossing(rows, tiles.parts)
    if splits.number > 1:
        sums = sum_splits(call, query_sums, [call.tokens["q"], dy], splits, denominators)
        dstate = rows.enter(dstate, sums, splits, REVERSE=True, SHARED=False)
    dstart, numbers = rows.separate(dS, dz), [*denominators, crossing]
    for tiles, keys, values in launches:
        kernel = causal_gradient_kernels.key_gradients
        rows.launch(kernel, tiles, splits, dstate, dstart, numbers=numbers, KEYS=keys, VALUES=values)
    return dk, dv, dS, dz, crossing


def empty_gradient(call: CausalCall) -> Tensors:
    lead = call.lead
    dlog_decay = None if call.log_decay is None else call.log_decay.new_empty(call.log_decay.shape)
    tokens = (gradient_shape(x, lead) for x in (call.q, call.k, call.v))
    return *tokens, call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape), dlog_decay, None
