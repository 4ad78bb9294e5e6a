"""The delta rule: each token first takes back what the state says at its key. The record, in order of preference."""

from linattn.ops.backends.delta import chunked, gradient, loopless, recurrent, reference
from linattn.ops.backends.delta.call import DeltaCall
from linattn.ops.backends.operator import Backend, Operator


def _no_kernels(call: DeltaCall) -> str:
    return "has no kernels for the delta rule; on a GPU too it runs as matrix products of torch"


_CHUNKED = Backend("chunked", None, chunked.forward, gradient.gradient, chunked.empty, saved=3, loops=True)
_BACKENDS = (
    Backend("triton", _no_kernels, reference.forward),
    recurrent.BACKEND,
    _CHUNKED,
    loopless.BACKEND,
    reference.BACKEND,
)

DELTA = Operator("delta", DeltaCall, outputs=2, backends=_BACKENDS)

__all__ = ["DELTA", "DeltaCall"]
