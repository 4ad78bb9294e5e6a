"""The definitions, with which every other backend must agree: each formula in plain torch. The causal one builds the
matrix of similarities. They return y, S and z, or those of them that they compute, and save nothing."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall, ReadCall, SumCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.numerics import accumulator, divide, exactly, zero_masked, zero_masked_tokens
from linattn.ops.operator import Backend


def decay_between(log_decay: Tensor) -> Tensor:
    """(*b, n, n): the factor by which key j has decayed at query i, exp(Σ log_decay over j < t ≤ i); 0 for j > i."""
    n = log_decay.shape[-1]
    after = torch.ones(n, n, dtype=torch.bool, device=log_decay.device).tril(-1)
    steps = log_decay.unsqueeze(-1).expand(*log_decay.shape, n)
    return torch.where(after, steps, 0).cumsum(-2).exp().tril()


def sum_keys(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    """S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j)."""
    dtype, phi = accumulator(call.k.dtype), ELEMENTWISE[call.feature_map].function
    # masked before φ too, or a NaN there would come back from φ's derivative
    k, v = (zero_masked(x.to(dtype), call.key_mask) for x in (call.k, call.v))
    k = zero_masked(phi(k), call.key_mask)
    S = k.mT @ v
    return S, k.sum(-2).expand(S.shape[:-1])


def read(call: ReadCall, save: bool) -> tuple[Tensor]:
    """y_i = φ(q_i) S, divided by φ(q_i)·z if `normalized`."""
    q = ELEMENTWISE[call.feature_map].function(call.q.to(call.S.dtype))
    y = q @ call.S
    return ((divide(y, q @ call.z.unsqueeze(-1)) if call.normalized else y).to(call.dtype),)


def features(call: CausalCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return φ(q), φ(k) and v in the accumulation dtype, with zeros for masked keys and values."""
    dtype, phi = accumulator(call.q.dtype), ELEMENTWISE[call.feature_map].function
    # as in `sum_keys`
    q, k, v = zero_masked_tokens(call.q.to(dtype), call.k.to(dtype), call.v.to(dtype), call.key_mask)
    return phi(q), zero_masked(phi(k), call.key_mask), v


def causal(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y_i = φ(q_i)·S_i / φ(q_i)·z_i with S_i = Σ_j D_ij φ(k_j) v_jᵀ + D_i S_0, likewise z_i, where D_ij =
    `decay_between` and D_i is the product of the decays until i."""
    (q, k, v), n = features(call), call.q.shape[-2]
    log_decay = q.new_zeros(n) if call.log_decay is None else call.log_decay.to(q.dtype)
    weight = decay_between(log_decay)
    start = log_decay.cumsum(-1).exp().unsqueeze(-1)
    if call.normalize == "keys":
        q = divide(q, weight @ k + start * call.z.unsqueeze(-2))
    similarity = (q @ k.mT) * weight
    y = similarity @ v + start * (q @ call.S)
    if call.normalize == "output":
        y = divide(y, similarity.sum(-1, keepdim=True) + start * (q @ call.z.unsqueeze(-1)))
    if n == 0:
        return y.to(call.v.dtype), call.S, call.z
    end = weight[..., -1, :].unsqueeze(-1)
    S = (k * end).mT @ v + start[..., -1:, :] * call.S
    z = (k * end).sum(-2) + start[..., -1, :] * call.z
    return y.to(call.v.dtype), S, z


def gated(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y_i = φ(q_i)·S_i / φ(q_i)·z_i with S_i = diag(exp(log_decay_i)) S_{i−1} + φ(k_i) v_iᵀ, likewise z_i."""
    assert call.log_decay is not None
    (q, k, v), S, z = features(call), call.S, call.z
    each, ys = [x.split(1, -2) for x in (q, k, v, call.log_decay.to(q.dtype).exp())], [q[..., :0, :] @ S]
    # a sequence without tokens splits into one part without tokens
    for q_i, k_i, v_i, a_i in zip(*each, strict=True) if q.shape[-2] else ():
        S, z = a_i.mT * S + k_i.mT * v_i, a_i.squeeze(-2) * z + k_i.squeeze(-2)
        y = (divide(q_i, z.unsqueeze(-2)) if call.normalize == "keys" else q_i) @ S
        ys.append(divide(y, q_i @ z.unsqueeze(-1)) if call.normalize == "output" else y)
    return torch.cat(ys, -2).to(call.v.dtype), S, z


CAUSAL, GATED, SUM_KEYS, READ = (Backend("reference", None, exactly(run)) for run in (causal, gated, sum_keys, read))
