"""The chunked form without loops: all chunks at once, in torch's own operators.

Inside a chunk it is the definition. Between chunks, the sums of chunks are added up, with the decays of whole chunks.
It keeps a state for every chunk in memory, which the loops of `fast/linear.py` do not."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.calls import CausalCall
from linattn.ops.definitions.linear import decay_between, features
from linattn.ops.numerics import divide, exactly
from linattn.ops.operator import Backend
from linattn.ops.tokens.cutting import cut, earlier, join

# with a decay per channel, a chunk has a number per pair of tokens and channel
CHUNK, GATED_CHUNK = 64, 32


def forward(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `definitions.linear.causal` and `gated` do, in chunks."""
    (q, k, v), dv = features(call), call.S.shape[-1]
    # with a column of ones, [S, z] is one sum and [numerator, denominator] one product
    v, start = F.pad(v, (0, 1), value=1.0), torch.cat([call.S, call.z.unsqueeze(-1)], -1)
    per_channel = call.log_decay is not None and call.log_decay.ndim == call.q.ndim
    chunk = GATED_CHUNK if per_channel else CHUNK
    q, k, v = (cut(x, chunk) for x in (q, k, v))
    seen, since, until, whole = earlier(chunk, q.device), None, None, None
    inside = seen.to(q.dtype).unsqueeze(0)
    if call.log_decay is not None:
        log_decay = call.log_decay.to(q.dtype)
        log_decay = cut(log_decay if per_channel else log_decay.unsqueeze(-1), chunk)
        # (… c 1 C C), or (… c f C C) with a decay per channel
        inside = decay_between(log_decay.mT)
        until = inside[..., -1, :].mT
        since, whole = log_decay.cumsum(-2).exp(), log_decay.sum(-2)
    states = _states(start, _times(k, until).mT @ v, whole)
    before = states[..., :-1, :, :]
    if call.normalize == "keys":
        z = before[..., dv].unsqueeze(-2)
        q = divide(q, (inside @ k.mT.unsqueeze(-1)).squeeze(-1).mT + _times(z, since))
    y = _similarities(q, k, inside, seen) @ v + _times(q, since) @ before
    y = divide(y[..., :dv], y[..., dv:]) if call.normalize == "output" else y[..., :dv]
    # copies, as views would keep the states of all chunks alive
    S, z = states[..., -1, :, :dv].clone(), states[..., -1, :, dv].clone()
    return join(y, call.q.shape[-2]).to(call.v.dtype), S, z


def _similarities(q: Tensor, k: Tensor, inside: Tensor, seen: Tensor) -> Tensor:
    """Σ_e q_ie k_je D_ije, D = `inside`, where `seen`, else zero: set, not multiplied, as infinity times 0 is NaN."""
    if inside.shape[-3] == 1:
        return (q @ k.mT).masked_fill(~seen, 0) * inside.squeeze(-3)
    return (q.mT.unsqueeze(-1) * k.mT.unsqueeze(-2) * inside).sum(-3).masked_fill(~seen, 0)


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _states(start: Tensor, sums: Tensor, log_decay: Tensor | None) -> Tensor:
    """Return [S, z] (… c+1 f dv+1) before each chunk and after the last, from `start` and chunks' sums and decays."""
    sums = torch.cat([start.unsqueeze(-3), sums.expand(*start.shape[:-2], *sums.shape[-3:])], -3)
    if log_decay is None:
        return sums.cumsum(-3)
    weights = decay_between(F.pad(log_decay.mT, (1, 0)))
    if weights.shape[-3] == 1:
        return (weights.squeeze(-3) @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])
    return (weights @ sums.movedim(-3, -2)).movedim(-2, -3)


BACKEND = Backend("plain", None, exactly(forward))
