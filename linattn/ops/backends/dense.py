"""The matrix of similarities, for short sequences: there the number of operations is what takes time.

    A = tril(φ(q) φ(k)ᵀ)        y = (A v + φ(q) S) / (A 1 + φ(q)·z)        S ← S + φ(k)ᵀ v

The gradient is that of `chunked` with one chunk, from saved features, A and denominators: all are small."""

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall, accumulator, infinite_if_none
from linattn.ops.backends.operator import Backend, Tensors
from linattn.ops.backends.reference import present
from linattn.ops.elementwise import ELEMENTWISE

# tokens, and numbers of A: a megabyte in float32. Beyond, chunks took less time
LONGEST, LARGEST = 128, 2**18


def unsupported(call: CausalCall) -> str | None:
    if torch.compiler.is_compiling():
        return "saves the time between operations, which a graph does not need"
    n = call.q.shape[-2]
    if n > LONGEST or call.q.shape[:-1].numel() * n > LARGEST:
        return f"builds the matrix of similarities, up to {LONGEST} tokens and {LARGEST:,} numbers in all"
    if call.log_decay is not None or call.normalize == "keys":
        return 'has no decay and no normalize="keys"'
    return None


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    q, k, v = _features(call)
    A = (q @ k.mT).tril_()
    y, S, z, d = A @ v, k.mT @ v, k.sum(-2), None
    if call.normalize:
        d = A.sum(-1, keepdim=True)
    if not call.fresh:
        y, S, z = y + q @ call.S, S + call.S, z + call.z
        d = d if d is None else d.add_(q @ call.z.unsqueeze(-1))
    if d is not None:
        d = infinite_if_none(d, nonnegative=ELEMENTWISE[call.feature_map].nonnegative)
        y.div_(d)
    none = A.new_empty(0)
    saved = (q, k, A, none if d is None else d) if save else (none,) * 4
    return y.to(call.v.dtype), S.expand(call.S.shape).contiguous(), z.expand(call.z.shape).contiguous(), *saved


def _features(call: CausalCall) -> tuple[Tensor, Tensor, Tensor]:
    dtype, phi = accumulator(call.q.dtype), ELEMENTWISE[call.feature_map].function
    q, k, v = call.q.to(dtype), call.k.to(dtype), call.v.to(dtype)
    # fewer operations on both at once
    q, k = phi(torch.stack([q, k])).unbind(0) if q.shape == k.shape else (phi(q), phi(k))
    if call.key_mask is None:
        return q, k, v
    # what a masked token holds, NaN too, must not reach the gradients of the keys that its query sees
    q = torch.where(call.key_mask.unsqueeze(-1) | q.isfinite(), q, 0)
    return q, present(k, call.key_mask), present(v, call.key_mask)


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """With y = N / d, dN = dy / d and dd = −dN·N / d; without an upstream gradient (None) its terms are left out."""
    if saved[0] is None or saved[0].numel() == 0:
        saved = forward(call, save=True)[3:]
    (q, k, A, d), (dy, dS, dz), phi = saved, grads, ELEMENTWISE[call.feature_map]
    assert q is not None and k is not None and A is not None and d is not None
    v = present(call.v.to(q.dtype), call.key_mask)
    dq, dk, dv, of_S, of_z = None, None, None, dS, dz
    if dy is not None:
        dN = dy.to(q.dtype) / d if call.normalize else dy.to(q.dtype)
        G, dv = dN @ v.mT, A.mT @ dN
        dq = None if call.fresh else dN @ call.S.mT
        if call.normalize:
            dd = torch.linalg.vecdot(A, G).unsqueeze(-1)
            dd = dd if dq is None else dd.add_(torch.linalg.vecdot(q, dq).unsqueeze(-1))
            dd.div_(d).neg_()
            G.add_(dd)
            if dq is not None:
                dq.add_(dd * call.z.unsqueeze(-2))
                of_z = _add(of_z, (q * dd).sum(-2).sum_to_size(call.z.shape))
        G.tril_()
        dq, dk = _add(dq, G @ k), G.mT @ q
        # queries that share a key, before the terms that each key has once
        dk, dv = (x.sum_to_size(*call.S.shape[:-2], *x.shape[-2:]) for x in (dk, dv))
        if not call.fresh:
            of_S = _add(of_S, (q.mT @ dN).sum_to_size(call.S.shape))
    if dS is not None:
        dk, dv = _add(dk, v @ dS.mT), _add(dv, k @ dS)
    if dz is not None:
        dk = _add(dk, dz.unsqueeze(-2))
    dk, dv = (x if x is None else present(x, call.key_mask) for x in (dk, dv))
    dq, dk = (x if x is None or phi.derivative is None else x * phi.derivative(y, None) for x, y in ((dq, q), (dk, k)))
    of_inputs = (
        x.new_zeros(x.shape) if g is None else g.sum_to_size(x.shape).to(x.dtype)
        for g, x in ((dq, call.q), (dk, call.k), (dv, call.v))
    )
    of_state = (x.new_zeros(x.shape) if g is None else g for g, x in ((of_S, call.S), (of_z, call.z)))
    return *of_inputs, *of_state, None, None


def _add(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    y = call.v.new_empty(*call.q.shape[:-1], call.S.shape[-1])
    sizes = [(0,)] * 4
    if save:
        q, k = call.q.shape, call.k.shape
        sizes = [q, k, (*q[:-1], k[-2]), (*q[:-1], 1) if call.normalize else (0,)]
    saved = (call.S.new_empty(size) for size in sizes)
    return y, call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape), *saved


BACKEND = Backend("dense", unsupported, forward, gradient, empty, saved=4, wants_all=False)
