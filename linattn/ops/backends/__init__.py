"""The operators and their backends, in order of preference: the first that can run a call does; the last is the
definition."""

from linattn.ops.backends import (
    chunked,
    chunked_gradient,
    dense,
    gated,
    gated_gradient,
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

_CHUNKED = Backend("chunked", None, chunked.forward, chunked_gradient.gradient, chunked.empty, saved=2, loops=True)

CAUSAL = Operator(
    "causal",
    CausalCall,
    outputs=3,
    backends=(triton.CAUSAL, recurrent.BACKEND, dense.BACKEND, _CHUNKED, loopless.BACKEND, reference.CAUSAL),
)
_GATED = Backend("chunked", None, gated.forward, gated_gradient.gradient, chunked.empty, saved=2, loops=True)
GATED = Operator(
    "gated",
    CausalCall,
    outputs=3,
    backends=(triton.GATED, recurrent.BACKEND, dense.BACKEND, _GATED, loopless.BACKEND, reference.GATED),
)
_SHARED = Backend(
    "chunked",
    None,
    shared.forward,
    shared_gradient.gradient,
    shared.empty,
    shared_gradient.empty_gradient,
    saved=1,
    loops=True,
)
SHARED = Operator(
    "shared",
    CausalCall,
    outputs=3,
    backends=(triton.CAUSAL, recurrent.BACKEND, dense.BACKEND, _SHARED, loopless.BACKEND, reference.CAUSAL),
)
SUM_KEYS = Operator("sum_keys", SumCall, 2, (triton.SUM_KEYS, sums.SUM_KEYS, reference.SUM_KEYS))
READ = Operator("read", ReadCall, 1, (triton.READ, sums.READ, reference.READ))

__all__ = ["CAUSAL", "GATED", "READ", "SHARED", "SUM_KEYS", "Backend", "CausalCall", "Operator", "ReadCall", "SumCall"]
