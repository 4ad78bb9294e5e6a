"""The operators and their backends, in order of preference: the first that can run a call does; the last is the
definition."""

from linattn.ops.backends import (
    chunked,
    chunked_gradient,
    dense,
    loopless,
    recurrent,
    reference,
    shared,
    shared_gradient,
    sums,
    triton,
)
from linattn.ops.backends.base import CausalCall, ReadCall, SumCall
from linattn.ops.backends.operator import Backend, Operator


def _causal(name: str, kernels: Backend, chunks: Backend, definition: Backend) -> Operator:
    backends = (kernels, recurrent.BACKEND, dense.BACKEND, chunks, loopless.BACKEND, definition)
    return Operator(name, CausalCall, 3, backends)


_CHUNKED = Backend("chunked", None, chunked.forward, chunked_gradient.gradient, chunked.empty, saved=2, loops=True)
_SHARED = Backend("chunked", None, shared.forward, shared_gradient.gradient, shared.empty, saved=1, loops=True)

# one function, and another way to make the chunks where heads share queries and keys
CAUSAL = _causal("causal", triton.CAUSAL, _CHUNKED, reference.CAUSAL)
GATED = _causal("gated", triton.GATED, _CHUNKED, reference.GATED)
SHARED = _causal("shared", triton.CAUSAL, _SHARED, reference.CAUSAL)
SUM_KEYS = Operator("sum_keys", SumCall, 2, (triton.SUM_KEYS, sums.SUM_KEYS, reference.SUM_KEYS))
READ = Operator("read", ReadCall, 1, (triton.READ, sums.READ, reference.READ))

__all__ = ["CAUSAL", "GATED", "READ", "SHARED", "SUM_KEYS", "Backend", "CausalCall", "Operator", "ReadCall", "SumCall"]
