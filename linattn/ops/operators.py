"""The table of operators, each with its forms in order of preference: the first that can run a call does; the last is
the definition."""

from linattn.ops import triton
from linattn.ops.calls import CausalCall, DeltaCall, ReadCall, SumCall
from linattn.ops.definitions import delta as delta_definition
from linattn.ops.definitions import linear as linear_definition
from linattn.ops.fast import (
    all_keys,
    delta,
    delta_gradient,
    linear,
    linear_gradient,
    parallel,
    recurrent,
    shared_queries,
    shared_queries_gradient,
)
from linattn.ops.operator import Backend, Operator
from linattn.ops.plain import delta as plain_delta
from linattn.ops.plain import linear as plain_linear


def _causal(name: str, kernels: Backend, chunks: Backend, definition: Backend) -> Operator:
    backends = (kernels, recurrent.LINEAR, parallel.BACKEND, chunks, plain_linear.BACKEND, definition)
    return Operator(name, CausalCall, 3, backends)


_NO_DELTA_KERNELS = delta_definition.BACKEND._replace(
    name="triton",
    unsupported=lambda _: "has no kernels for the delta rule; on a GPU too it runs as matrix products of torch",
)
_LINEAR = Backend("chunked", None, linear.forward, linear_gradient.gradient, linear.empty, saved=2, loops=True)
_SHARED = Backend(
    "chunked", None, shared_queries.forward, shared_queries_gradient.gradient, shared_queries.empty, saved=1, loops=True
)
_DELTA = Backend("chunked", None, delta.forward, delta_gradient.gradient, delta.empty, saved=3, loops=True)

# one function, and another way to make the chunks where heads share queries and keys
CAUSAL = _causal("causal", triton.CAUSAL, _LINEAR, linear_definition.CAUSAL)
GATED = _causal("gated", triton.GATED, _LINEAR, linear_definition.GATED)
SHARED = _causal("shared", triton.CAUSAL, _SHARED, linear_definition.CAUSAL)
SUM_KEYS = Operator("sum_keys", SumCall, 2, (triton.SUM_KEYS, all_keys.SUM_KEYS, linear_definition.SUM_KEYS))
READ = Operator("read", ReadCall, 1, (triton.READ, all_keys.READ, linear_definition.READ))
_DELTA_FORMS = (_NO_DELTA_KERNELS, recurrent.DELTA, _DELTA, plain_delta.BACKEND, delta_definition.BACKEND)
DELTA = Operator("delta", DeltaCall, 2, _DELTA_FORMS)
