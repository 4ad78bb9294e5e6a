"""The causal operator with the kernels: forward, gradient, and a kernel for a single token."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.numerics import summed
from linattn.ops.operator import Tensors
from linattn.ops.triton import causal_gradient_kernels, causal_kernels, one_token
from linattn.ops.triton.decay_kernel import weigh
from linattn.ops.triton.launch import (
    Inputs,
    Rows,
    States,
    gradient_shape,
    in_words,
    launch_query_gradient,
    sum_splits,
)
from linattn.ops.triton.layout import empty_outputs, readable
from linattn.ops.triton.one_token import readable_call
from linattn.ops.triton.split_kernels import key_sums, query_sums
from linattn.ops.triton.tiling import Split


def _initial_states(rows: Rows, S: Tensor, z: Tensor, splits: Split) -> States:
    """Return the states before each split, from S and z, those before the call."""
    inputs, state = rows.inputs, rows.shared(S, z)
    if splits.number == 1:
        return state
    sums = sum_splits(inputs, key_sums, [inputs.tokens[name] for name in "kv"], splits)
    return rows.enter(state, sums, splits, REVERSE=False, SHARED=True)


def _with_weights(call: CausalCall) -> tuple[Inputs, Tensor, Tensor]:
    """Return the kernels' view of a call, with weights from `weigh` in place of the decay, and the call's S and z."""
    inputs, S, z = readable_call(call._replace(key_mask=in_words(call.key_mask)))
    if inputs.log_decay is not None:
        inputs.log_decay = weigh(inputs.log_decay, inputs.shape.over_values().C)
    return inputs, S, z


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    if call.q.shape[-2] == 1:
        return one_token.forward(call)
    inputs, S, z = _with_weights(call)
    y = empty_outputs(inputs.tokens["q"], inputs.lead, inputs.dv)
    S_end, z_end = torch.empty_like(S), torch.empty_like(z)
    rows, tiles = Rows(inputs, [*inputs.tokens.values(), y], z), inputs.shape.over_values()
    splits = rows.split(tiles)
    rows.launch(causal_kernels.forward, tiles, splits, _initial_states(rows, S, z, splits), rows.shared(S_end, z_end))
    return y, S_end, z_end


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    y = empty_outputs(readable(call.q, call.lead), call.lead, call.v.shape[-1])
    return y, torch.empty_like(call.S.contiguous()), torch.empty_like(call.z.contiguous())


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    (inputs, S, z), log_decay, (dy, dS_end, dz_end) = _with_weights(call), call.log_decay, grads
    assert dy is not None and dS_end is not None and dz_end is not None
    dy = readable(dy, inputs.lead)
    dq, denominators, earlier = _query_gradient(inputs, S, z, dy)
    dend = dS_end.contiguous(), dz_end.contiguous()
    *gradients, later = _key_gradients(inputs, dy, dend, denominators)
    dlog_decay = None
    if log_decay is not None:
        dS, dz = gradients[2:]
        change = later.sum(1, dtype=torch.float64) - earlier.sum(1, dtype=torch.float64)
        start = (S * dS).sum((-1, -2), dtype=torch.float64) + (z * dz).sum(-1, dtype=torch.float64)
        dlog_decay = _decay_gradient(log_decay, change.view(*inputs.lead, inputs.n), start)
    return *(summed(g, x) for g, x in zip((dq, *gradients), call[:5], strict=True)), dlog_decay, None


def _decay_gradient(log_decay: Tensor, change: Tensor, start: Tensor) -> Tensor:
    """Return the gradient of `log_decay` (…, n). For token t it is the sum of M_ij (`query_gradient`) over queries i ≥
    t and keys j < t, the pairs that this decay multiplies. `start` (…) is the sum for the first token, with keys of the
    state before the call. `change` (…, n) is the sum for the next token minus that for this one: the pairs of this key
    with later queries, minus those of this query with earlier keys. No token is paired with itself: this term is the
    largest by far among strong decays, and its rounding errors would stay in all later sums."""
    shape = log_decay.shape
    change, start = change.sum_to_size(*shape), start.unsqueeze(-1).sum_to_size(*shape[:-1], 1)
    total = start + change.cumsum(-1) - change
    return total.masked_fill(log_decay == -torch.inf, 0).to(log_decay.dtype)


def _pair_sums(rows: Rows, programs: int) -> Tensor:
    """Return memory for a kernel's `crossing`, a sum per token in each program: (rows, programs, n), or none."""
    inputs = rows.inputs
    return inputs.empty(0) if inputs.log_decay is None else inputs.empty(rows.number, programs, inputs.n)


def _query_gradient(inputs: Inputs, S: Tensor, z: Tensor, dy: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Return dq, the results of `launch_query_gradient` and, per query and program, sums of M_ij over earlier keys."""
    dq, tiles = inputs.empty_gradient("q"), inputs.shape.over_queries()
    rows = Rows(inputs, [*inputs.tokens.values(), dy, dq], z)
    splits, pair_sums = rows.split(tiles), _pair_sums(rows, tiles.parts)
    state = _initial_states(rows, S, z, splits)
    kernel = causal_gradient_kernels.query_gradient
    return dq, launch_query_gradient(rows, kernel, tiles, splits, state, [pair_sums]), pair_sums


def _key_gradients(
    inputs: Inputs, dy: Tensor, dend: tuple[Tensor, Tensor], denominators: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Return dk, dv, dS and dz in every row, and per key and program the sum of M_ij (`query_gradient`) over later
    queries. `dend` are the gradients of the last S and z, `denominators` the results of `launch_query_gradient`."""
    dk, dv = inputs.empty_gradient("k"), inputs.empty_gradient("v")
    dS, dz = inputs.empty(*inputs.lead, inputs.f, inputs.dv), inputs.empty(*inputs.lead, inputs.f)
    rows, launches = Rows(inputs, [*inputs.tokens.values(), dy, dk, dv], dend[1]), inputs.shape.over_both()
    tiles, *_ = launches[0]
    splits, dstate, pair_sums = rows.split(tiles), rows.shared(*dend), _pair_sums(rows, tiles.parts)
    if splits.number > 1:
        sums = sum_splits(inputs, query_sums, [inputs.tokens["q"], dy], splits, denominators)
        dstate = rows.enter(dstate, sums, splits, REVERSE=True, SHARED=False)
    dstart, numbers = rows.separate(dS, dz), [*denominators, pair_sums]
    for tiles, keys, values in launches:
        kernel = causal_gradient_kernels.key_gradients
        rows.launch(kernel, tiles, splits, dstate, dstart, numbers=numbers, KEYS=keys, VALUES=values)
    return dk, dv, dS, dz, pair_sums


def empty_gradient(call: CausalCall) -> Tensors:
    lead = call.lead
    dlog_decay = None if call.log_decay is None else call.log_decay.new_empty(call.log_decay.shape)
    tokens = (gradient_shape(x, lead) for x in (call.q, call.k, call.v))
    return *tokens, call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape), dlog_decay, None
