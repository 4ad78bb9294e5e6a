"""Attention to all keys with the kernels, in two operations, each with a gradient: sum the keys, read the sums."""

import torch
from torch import Tensor

from linattn.ops.calls import ReadCall, SumCall
from linattn.ops.numerics import summed
from linattn.ops.operator import Tensors
from linattn.ops.triton import bidirectional_kernels as kernels
from linattn.ops.triton.launch import Inputs, Rows, gradient_shape, in_words, launch_query_gradient, sum_splits
from linattn.ops.triton.layout import empty_like_tokens, readable
from linattn.ops.triton.split_kernels import key_sums, query_sums


def _keys(call: SumCall) -> Inputs:
    """Return the kernels' view of keys and values. A row is a key head of a batch element."""
    k, v, key_mask, feature_map = call
    return Inputs(call.lead, {"k": k, "v": v}, v.shape[-1], feature_map, key_mask=in_words(key_mask))


def sum_keys(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    inputs = _keys(call)
    S, z, _ = sum_splits(inputs, key_sums, list(inputs.tokens.values()))
    return S.sum(-3), z.sum(-2)


def empty_sums(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    k, v, lead = call.k, call.v, call.lead
    S = k.new_empty(*lead, k.shape[-1], v.shape[-1], dtype=torch.float32)
    return S, k.new_empty(*lead, k.shape[-1], dtype=torch.float32)


def sum_keys_gradient(call: SumCall, saved: Tensors, grads: Tensors) -> Tensors:
    inputs, (dS, dz) = _keys(call), grads
    assert dS is not None and dz is not None
    dS, dz, dk, dv = dS.contiguous(), dz.contiguous(), inputs.empty_gradient("k"), inputs.empty_gradient("v")
    rows = Rows(inputs, [*inputs.tokens.values(), dk, dv], dz)
    dstate = rows.shared(dS, dz)
    for tiles, keys, values in inputs.shape.over_both():
        kernel = kernels.key_sums_gradient
        rows.launch(kernel, tiles, rows.split(tiles), dstate, KEYS=keys, VALUES=values)
    return summed(dk, call.k), summed(dv, call.v), None


def empty_sums_gradient(call: SumCall) -> Tensors:
    lead = call.lead
    return gradient_shape(call.k, lead), gradient_shape(call.v, lead), None


def _queries(call: ReadCall) -> tuple[Inputs, Tensor, Tensor]:
    """Return the kernels' view of the queries, expanded to all rows, and the sums S and z that they read."""
    (q, S, z, normalized, feature_map, _), lead = call, call.lead
    inputs = Inputs(lead, {"q": q.expand(*lead, *q.shape[-2:])}, S.shape[-1], feature_map, normalized)
    return inputs, S.contiguous(), z.contiguous()


def read(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    inputs, S, z = _queries(call)
    y, tiles = empty_like_tokens(inputs.tokens["q"], inputs.dv), inputs.shape.over_values()
    rows = Rows(inputs, [*inputs.tokens.values(), y], z)
    rows.launch(kernels.read, tiles, rows.split(tiles), rows.shared(S, z))
    return (y.to(call.dtype),)


def empty_outputs(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    lead = call.lead
    q = readable(call.q.expand(*lead, *call.q.shape[-2:]), lead)
    return (empty_like_tokens(q, call.S.shape[-1]).to(call.dtype),)


def read_gradient(call: ReadCall, saved: Tensors, grads: Tensors) -> Tensors:
    (inputs, S, z), (dy,) = _queries(call), grads
    assert dy is not None
    dy, dq = readable(dy.to(call.q.dtype), inputs.lead), empty_like_tokens(inputs.tokens["q"], inputs.f)
    rows, tiles = Rows(inputs, [*inputs.tokens.values(), dy, dq], z), inputs.shape.over_queries()
    state, splits = rows.shared(S, z), rows.split(tiles)
    denominators = launch_query_gradient(rows, kernels.read_gradient, tiles, splits, state)
    dS, dz, _ = sum_splits(inputs, query_sums, [*inputs.tokens.values(), dy], numbers=denominators)
    return summed(dq, call.q), dS.sum(-3).sum_to_size(S.shape), dz.sum(-2).sum_to_size(z.shape)


def empty_read_gradient(call: ReadCall) -> Tensors:
    lead = call.lead
    return gradient_shape(call.q, lead), call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape)
