"""Attention to all keys: sum them up once, then read the sums. Two operators, so that an encoder's output is summed
only once, however many queries come later; each walks through its tokens in segments and saves nothing but its inputs.

    S = φ(k)ᵀ v    z = Σ φ(k)        y = φ(q) S / (φ(q)·z)"""

import torch
from torch import Tensor

from linattn.ops.backends.base import ReadCall, SumCall, accumulator, divide, infinite_if_none
from linattn.ops.backends.memory import Workspace, empty_like
from linattn.ops.backends.operator import Backend, Tensors, cannot_export
from linattn.ops.elementwise import ELEMENTWISE

# numbers of one tensor in a segment: a megabyte in float32, so that what is computed of them stays in the cache
BLOCK = 2**18
# tokens of a segment: with more of them, products of narrow tensors would add up rounding errors
SHORTEST, LONGEST = 256, 2048


def _segments(x: Tensor) -> list[tuple[int, int]]:
    n = x.shape[-2]
    length = min(LONGEST, max(SHORTEST, BLOCK // max(1, x[..., :1, :].numel())))
    return [(start, min(length, n - start)) for start in range(0, n, length)]


def _features(x: Tensor, start: int, length: int, feature_map: str, work: Workspace) -> Tensor:
    x = work.copy("features", x.narrow(-2, start, length))
    return ELEMENTWISE[feature_map].overwrite(x, work.scratch(x))


def _through_map(gradient: Tensor, features: Tensor, feature_map: str, work: Workspace) -> Tensor:
    derivative = ELEMENTWISE[feature_map].derivative
    return gradient if derivative is None else gradient * derivative(features, work.scratch(features))


def _present(x: Tensor, key_mask: Tensor | None, start: int, length: int) -> Tensor:
    return x if key_mask is None else torch.where(key_mask.narrow(-1, start, length).unsqueeze(-1), x, 0)


def _lead(call: SumCall) -> tuple[int, ...]:
    mask = () if call.key_mask is None else call.key_mask.shape[:-1]
    return torch.broadcast_shapes(call.k.shape[:-2], call.v.shape[:-2], mask)


def sum_keys(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    k, v, key_mask, feature_map = call
    dtype, lead = accumulator(k.dtype), _lead(call)
    S, z = (k.new_zeros(*lead, k.shape[-1], width, dtype=dtype) for width in (v.shape[-1], 1))
    work = Workspace(S)
    for start, length in _segments(k):
        features = _present(_features(k, start, length, feature_map, work), key_mask, start, length)
        S += features.mT @ _present(v.narrow(-2, start, length).to(dtype), key_mask, start, length)
        z += features.sum(-2).unsqueeze(-1)
    return S, z.squeeze(-1)


def sum_keys_gradient(call: SumCall, saved: Tensors, grads: Tensors) -> Tensors:
    (k, v, key_mask, feature_map), (dS, dz) = call, grads
    assert dS is not None and dz is not None
    dk, dv, work = empty_like(k, k.shape), empty_like(v, v.shape), Workspace(dS)
    for start, length in _segments(k):
        features = _present(_features(k, start, length, feature_map, work), key_mask, start, length)
        values = v.narrow(-2, start, length).to(dS.dtype)
        of_k = _present((values @ dS.mT).add_(dz.unsqueeze(-2)), key_mask, start, length)
        of_k, of_v = _through_map(of_k, features, feature_map, work), features @ dS
        for x, of_x in ((dk, of_k), (dv, of_v)):
            part = x.narrow(-2, start, length)
            part.copy_(of_x.sum_to_size(*part.shape))
    return dk, dv, None


def _denominator(features: Tensor, z: Tensor) -> Tensor:
    """φ(q)·z of rows, (…, n, 1): as a product it would take half a matrix product's time."""
    return infinite_if_none((features * z.unsqueeze(-2)).sum(-1, keepdim=True))


def read(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    q, S, z, normalize, feature_map, dtype = call
    if normalize == "keys":
        S = divide(S, z.unsqueeze(-1))
    lead = torch.broadcast_shapes(q.shape[:-2], S.shape[:-2])
    y, work = empty_like(q.new_empty(0, dtype=dtype), (*lead, q.shape[-2], S.shape[-1])), Workspace(S)
    for start, length in _segments(q):
        features = _features(q, start, length, feature_map, work)
        part = features @ S
        if normalize == "output":
            part.div_(_denominator(features, z))
        y.narrow(-2, start, length).copy_(part)
    return (y,)


def read_gradient(call: ReadCall, saved: Tensors, grads: Tensors) -> Tensors:
    (q, S, z, normalize, feature_map, _), (dy,) = call, grads
    assert dy is not None
    T, total = (divide(S, z.unsqueeze(-1)) if normalize == "keys" else S), z.unsqueeze(-1)
    dq, dT, dtotal, work = empty_like(q, q.shape), torch.zeros_like(T), torch.zeros_like(total), Workspace(S)
    for start, length in _segments(q):
        features, x = _features(q, start, length, feature_map, work), q.narrow(-2, start, length)
        dy_part = dy.narrow(-2, start, length).to(T.dtype)
        if normalize == "output":
            # y = N / d: dN = dy / d and dd = −dN·N / d, as y itself was rounded
            d = _denominator(features, z)
            dy_part = dy_part / d
            part = dy_part @ T.mT
            dd = (features * part).sum(-1, keepdim=True).div_(d).neg_()
            part.add_(dd * total.mT)
            dtotal += (features * dd).sum(-2).unsqueeze(-1).sum_to_size(*total.shape)
        else:
            part = dy_part @ T.mT
        dT += (features.mT @ dy_part).sum_to_size(*T.shape)
        part = part.sum_to_size(*x.shape)
        dq.narrow(-2, start, length).copy_(_through_map(part, features, feature_map, work))
    if normalize == "keys":
        return dq, divide(dT, total), -divide(dT * T, total).sum(-1)
    return dq, dT, dtotal.squeeze(-1)


def empty_sums(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    lead, dtype = _lead(call), accumulator(call.k.dtype)
    S = call.k.new_empty(*lead, call.k.shape[-1], call.v.shape[-1], dtype=dtype)
    return S, call.k.new_empty(*lead, call.k.shape[-1], dtype=dtype)


def empty_outputs(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    lead = torch.broadcast_shapes(call.q.shape[:-2], call.S.shape[:-2])
    return (call.q.new_empty(*lead, call.q.shape[-2], call.S.shape[-1], dtype=call.dtype),)


SUM_KEYS = Backend("chunked", cannot_export, sum_keys, sum_keys_gradient, empty_sums)
READ = Backend("chunked", cannot_export, read, read_gradient, empty_outputs)
