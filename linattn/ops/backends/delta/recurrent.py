"""One token: the definition's step. The form for generation."""

from torch import Tensor

from linattn.ops.backends.base import accumulator, exactly
from linattn.ops.backends.delta.call import DeltaCall
from linattn.ops.backends.delta.reference import step
from linattn.ops.backends.operator import Backend


def forward(call: DeltaCall, save: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulator(call.q.dtype)
    q, k, v, beta = (x.to(dtype) for x in call[:4])
    y, S = step(call.S, q, k, v, beta, None if call.log_decay is None else call.log_decay.to(dtype))
    return (y * call.scale).to(call.v.dtype), S


BACKEND = Backend("recurrent", None, exactly(forward), one_token=True)
