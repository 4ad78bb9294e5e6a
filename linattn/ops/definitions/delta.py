"""The definition, token by token. Yang et al., Gated Delta Networks, https://arxiv.org/abs/2412.06464, eq. 10."""

import torch
from torch import Tensor

from linattn.ops.calls import DeltaCall
from linattn.ops.numerics import accumulator, check_exported_length, exactly
from linattn.ops.operator import Backend


def step(
    S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    removal_key: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y and S after one token (…, 1, d): S = diag(α) S, then S = S + β k (v − Sᵀ r)ᵀ and y = Sᵀ q, where r is
    the removal key (None: k)."""
    if log_decay is not None:
        S = log_decay.exp().mT * S
    S = S + k.mT * (beta * (v - (k if removal_key is None else removal_key) @ S))
    return q @ S, S


def forward(call: DeltaCall, save: bool) -> tuple[Tensor, Tensor]:
    check_exported_length(call.q.shape[-2], 'backend="reference"')
    dtype, S = accumulator(call.q.dtype), call.S
    q, k, v, beta = (x.to(dtype) for x in call[:4])
    each = [x.split(1, -2) for x in (q, k, v, beta)]
    others = (call.log_decay, call.removal_key)
    each += [[None] * len(each[0]) if x is None else x.to(dtype).split(1, -2) for x in others]
    ys = [q[..., :0, :] @ S]
    # a sequence without tokens splits into one part without tokens
    for token in zip(*each, strict=True) if q.shape[-2] else ():
        y, S = step(S, *token)
        ys.append(y)
    return (torch.cat(ys, -2) * call.scale).to(call.v.dtype), S


BACKEND = Backend("reference", None, exactly(forward))
