"""One token: add it to the state, then read the state. The form for generation, a handful of small operations, which
torch differentiates: it saves nothing, so `save` changes nothing."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall, DeltaCall
from linattn.ops.definitions.delta import step
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.numerics import accumulator, divide, exactly, infinite_if_none, zero_masked_tokens
from linattn.ops.operator import Backend


def linear(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, S and z: S = a S + φ(k) vᵀ and z = a z + φ(k) with the decay a, then y = φ(q) S / φ(q)·z."""
    dtype, phi = accumulator(call.q.dtype), ELEMENTWISE[call.feature_map]
    q, k, v, S, z = call.q, call.k, call.v, call.S, call.z
    if q.dtype != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q, k, v = zero_masked_tokens(q, k, v, call.key_mask)
    # for a single token the number of operations is all that counts
    if q.shape == k.shape:
        q, k = phi.function(torch.cat([q, k], -2)).unbind(-2)
    else:
        q, k = phi.function(q).squeeze(-2), phi.function(k).squeeze(-2)
    if call.key_mask is not None:
        k = torch.where(call.key_mask, k, 0)
    if call.log_decay is not None:
        # (…, 1) per head, (…, f) per channel
        decay = call.log_decay.flatten(z.ndim - 1).to(dtype).exp()
        S, z = decay.unsqueeze(-1) * S, decay * z
    # (f, 1) times (1, dv) is the outer product
    S, z = torch.addcmul(S, k.unsqueeze(-1), v), z + k
    # S over z is a mean of values: q over z may leave the range of its dtype, and its derivative does so earlier
    means = divide(S, z.unsqueeze(-1)) if call.normalize == "keys" else S
    # a sum, as autocast, which would take products in half precision, leaves it alone: asking for it takes longer
    y = (q.unsqueeze(-1) * means).sum(-2, keepdim=True)
    if call.normalize == "output":
        denominator = infinite_if_none((q * z).sum(-1, keepdim=True), nonnegative=phi.nonnegative)
        y = y / denominator.unsqueeze(-1)
    return (y if y.dtype == call.v.dtype else y.to(call.v.dtype)), S, z


def delta(call: DeltaCall, save: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulator(call.q.dtype)
    q, k, v, beta = (x.to(dtype) for x in call[:4])
    y, S = step(call.S, q, k, v, beta, *(None if x is None else x.to(dtype) for x in call[5:7]))
    return (y * call.scale).to(call.v.dtype), S


LINEAR = Backend("recurrent", None, linear, one_token=True)
DELTA = Backend("recurrent", None, exactly(delta), one_token=True)
