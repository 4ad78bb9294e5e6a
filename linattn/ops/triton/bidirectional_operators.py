"""The halves of attention to all keys with the kernels, sum the keys and read the sums; and their gradients."""

import torch
from torch import Tensor

from linattn.ops.calls import ReadCall, SumCall
from linattn.ops.numerics import divide
from linattn.ops.operator import Tensors
from linattn.ops.triton import bidirectional_kernels as kernels
from linattn.ops.triton.launch import Call, Rows, gradient_shape, in_words, launch_query_gradient, sum_splits, summed
from linattn.ops.triton.layout import empty_like_tokens, readable
from linattn.ops.triton.split_kernels import key_sums, query_sums
from linattn.ops.triton.tiling import over_both, over_queries, over_values


def _align(x: Tensor, ndim: int) -> Tensor:
    return x[(None,) * (ndim - x.ndim)]


def _keys_lead(call: SumCall) -> torch.Size:
    mask = torch.Size() if call.key_mask is None else call.key_mask.shape[:-1]
    return torch.broadcast_shapes(call.k.shape[:-2], call.v.shape[:-2], mask)


def _keys(given: SumCall) -> Call:
    """Keys and values in rows of their own."""
    (k, v, key_mask, feature_map), lead = given, _keys_lead(given)
    tokens = {"k": _align(k, len(lead) + 2), "v": _align(v, len(lead) + 2)}
    key_mask = None if key_mask is None else _align(key_mask, len(lead) + 1)
    return Call(lead, tokens, v.shape[-1], feature_map, key_mask=in_words(key_mask))


def sum_keys(given: SumCall, save: bool) -> tuple[Tensor, ...]:
    call = _keys(given)
    S, z, _ = sum_splits(call, key_sums, list(call.tokens.values()))
    return S.sum(-3), z.sum(-2)


def empty_sums(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    k, v, lead = call.k, call.v, _keys_lead(call)
    S = k.new_empty(*lead, k.shape[-1], v.shape[-1], dtype=torch.float32)
    return S, k.new_empty(*lead, k.shape[-1], dtype=torch.float32)


def sum_keys_gradient(given: SumCall, saved: Tensors, grads: Tensors) -> Tensors:
    call, (dS, dz) = _keys(given), grads
    assert dS is not None and dz is not None
    dS, dz, dk, dv = dS.contiguous(), dz.contiguous(), call.empty_gradient("k"), call.empty_gradient("v")
    rows = Rows(call, [*call.tokens.values(), dk, dv], dz)
    dstate = rows.shared(dS, dz)
    for tiles, keys, values in over_both(*call.shape):
        kernel = kernels.key_sums_gradient
        rows.launch(kernel, tiles, rows.split(tiles), dstate, KEYS=keys, VALUES=values)
    return summed(dk, given.k), summed(dv, given.v), None


def empty_sums_gradient(call: SumCall) -> Tensors:
    lead = _keys_lead(call)
    return gradient_shape(call.k, lead), gradient_shape(call.v, lead), None


def _queries_lead(call: ReadCall) -> torch.Size:
    return torch.broadcast_shapes(call.q.shape[:-2], call.S.shape[:-2], call.z.shape[:-1])


def _queries(given: ReadCall) -> tuple[Call, Tensor, Tensor]:
    """Return queries in the rows of both, and the sums that they read. Queries that serve several rows are expanded."""
    q, S, z, normalize, feature_map, _ = given
    lead, sums = _queries_lead(given), torch.broadcast_shapes(S.shape[:-2], z.shape[:-1])
    S, z = S.expand(*sums, *S.shape[-2:]), z.expand(*sums, z.shape[-1])
    call = Call(lead, {"q": q.expand(*lead, *q.shape[-2:])}, S.shape[-1], feature_map, normalize == "output")
    return call, _align(S, len(lead) + 2).contiguous(), _align(z, len(lead) + 1).contiguous()


def _means(call: ReadCall) -> Tensor:
    """Return the sums that queries are multiplied with."""
    return divide(call.S, call.z.unsqueeze(-1)) if call.normalize == "keys" else call.S


def read(given: ReadCall, save: bool) -> tuple[Tensor, ...]:
    call, S, z = _queries(given._replace(S=_means(given)))
    y, tiles = empty_like_tokens(call.tokens["q"], call.dv), over_values(*call.shape)
    rows = Rows(call, [*call.tokens.values(), y], z)
    rows.launch(kernels.read, tiles, rows.split(tiles), rows.shared(S, z))
    return (y.to(given.dtype),)


def empty_outputs(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    lead = _queries_lead(call)
    q = readable(call.q.expand(*lead, *call.q.shape[-2:]), lead)
    return (empty_like_tokens(q, call.S.shape[-1]).to(call.dtype),)


def read_gradient(given: ReadCall, saved: Tensors, grads: Tensors) -> Tensors:
    """With "keys", y = φ(q) T and T = S / z, so dS = dT / z and dz = −(dT ∘ T) 1 / z."""
    if given.normalize != "keys":
        return _read_gradient(given, grads)
    T, z = _means(given), given.z.unsqueeze(-1)
    dq, dT, _ = _read_gradient(given._replace(S=T, normalize=None), grads)
    return dq, divide(dT, z), -divide(dT * T, z).sum(-1)


def _read_gradient(given: ReadCall, grads: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    (call, S, z), (dy,) = _queries(given), grads
    assert dy is not None
    dy, dq = readable(dy.to(given.q.dtype), call.lead), empty_like_tokens(call.tokens["q"], call.f)
    rows, tiles = Rows(call, [*call.tokens.values(), dy, dq], z), over_queries(*call.shape)
    state, splits = rows.shared(S, z), rows.split(tiles)
    denominators = launch_query_gradient(rows, kernels.read_gradient, tiles, splits, state)
    dS, dz, _ = sum_splits(call, query_sums, [*call.tokens.values(), dy], numbers=denominators)
    return summed(dq, given.q), dS.sum(-3).sum_to_size(*given.S.shape), dz.sum(-2).sum_to_size(*given.z.shape)


def empty_read_gradient(call: ReadCall) -> Tensors:
    lead = _queries_lead(call)
    return gradient_shape(call.q, lead), call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape)
