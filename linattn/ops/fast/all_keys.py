"""Attention to all keys: sum them up once, then read the sums. These are two operators, so that an encoder's output is
summed only once, however many queries come later. Each loops over segments of tokens and saves nothing for gradients.

    S = φ(k)ᵀ v    z = Σ φ(k)        y = φ(q) S / (φ(q)·z)"""

from collections.abc import Iterator

import torch
from torch import Tensor

from linattn.ops.calls import ReadCall, SumCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import BLOCK, Workspace, empty_like
from linattn.ops.numerics import accumulator, infinite_if_none, zero_masked
from linattn.ops.operator import Backend, Tensors

# tokens of a segment: with more of them, products of narrow tensors would add up rounding errors
SHORTEST, LONGEST = 256, 2048


def _segments(x: Tensor) -> Iterator[slice]:
    """Yield slices that cut the tokens of x (…, n, d) into segments."""
    length = min(LONGEST, max(SHORTEST, BLOCK // max(1, x[..., :1, :].numel())))
    return (slice(start, start + length) for start in range(0, x.shape[-2], length))


def _keys(call: SumCall, segment: slice, work: Workspace) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the segment's features φ(k), values and mask. Masked features and values are zeros."""
    mask = None if call.key_mask is None else call.key_mask[..., segment]
    k = work.features("k", call.k[..., segment, :], ELEMENTWISE[call.feature_map])
    return zero_masked(k, mask), zero_masked(call.v[..., segment, :].to(k.dtype), mask), mask


def sum_keys(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    S, z = (x.zero_() for x in empty_sums(call, save))
    work = Workspace(S)
    for part in _segments(call.k):
        k, v, _ = _keys(call, part, work)
        S += k.mT @ v
        z += k.sum(-2)
    return S, z


def sum_keys_gradient(call: SumCall, saved: Tensors, grads: Tensors) -> Tensors:
    dS, dz = grads
    assert dS is not None and dz is not None
    dk, dv, work = empty_like(call.k, call.k.shape), empty_like(call.v, call.v.shape), Workspace(dS)
    for part in _segments(call.k):
        k, v, mask = _keys(call, part, work)
        of_k = zero_masked((v @ dS.mT).add_(dz.unsqueeze(-2)), mask)
        of_k = work.map_gradient(of_k, k, ELEMENTWISE[call.feature_map])
        for x, of_x in ((dk[..., part, :], of_k), (dv[..., part, :], k @ dS)):
            x.copy_(of_x.sum_to_size(x.shape))
    return dk, dv, None


def empty_sums(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    sizes, dtype = (call.k.shape[-1], call.v.shape[-1]), accumulator(call.k.dtype)
    return tuple(call.k.new_empty(*call.lead, *size, dtype=dtype) for size in (sizes, sizes[:1]))


def _queries(call: ReadCall, segment: slice, work: Workspace) -> tuple[Tensor, Tensor | None]:
    """Return the segment's features φ(q), and the denominators (…, n, 1) or None."""
    q = work.features("q", call.q[..., segment, :], ELEMENTWISE[call.feature_map])
    # as a product it would take half a matrix product's time
    return q, infinite_if_none((q * call.z.unsqueeze(-2)).sum(-1, keepdim=True)) if call.normalized else None


def read(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    (y,), work = empty_outputs(call, save), Workspace(call.S)
    for part in _segments(call.q):
        q, d = _queries(call, part, work)
        y[..., part, :] = q @ call.S if d is None else (q @ call.S).div_(d)
    return (y,)


def read_gradient(call: ReadCall, saved: Tensors, grads: Tensors) -> Tensors:
    (q, S, z, _, feature_map, _), (dy,) = call, grads
    assert dy is not None
    dq, dS, dz, work = empty_like(q, q.shape), torch.zeros_like(S), torch.zeros_like(z), Workspace(S)
    for part in _segments(q):
        (features, d), dN, target = _queries(call, part, work), dy[..., part, :].to(S.dtype), dq[..., part, :]
        dN = dN if d is None else dN / d
        of_q = dN @ S.mT
        if d is not None:
            # y = N / d: dN = dy / d and dd = −dN·N / d, as y itself was rounded
            dd = (features * of_q).sum(-1, keepdim=True).div_(d).neg_()
            of_q.add_(dd * z.unsqueeze(-2))
            dz += (features * dd).sum(-2).sum_to_size(z.shape)
        dS += (features.mT @ dN).sum_to_size(S.shape)
        target.copy_(work.map_gradient(of_q.sum_to_size(target.shape), features, ELEMENTWISE[feature_map]))
    return dq, dS, dz


def empty_outputs(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    return (empty_like(call.q.new_empty(0, dtype=call.dtype), (*call.lead, call.q.shape[-2], call.S.shape[-1])),)


SUM_KEYS = Backend("chunked", None, sum_keys, sum_keys_gradient, empty_sums, loops=True)
READ = Backend("chunked", None, read, read_gradient, empty_outputs, loops=True)
