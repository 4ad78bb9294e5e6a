"""Explain which backend a call takes with `backend=None`, and why not the others."""

from jaxtyping import Bool, Float
from torch import Tensor

from linattn.checks import check_types
from linattn.ops.delta import delta_call
from linattn.ops.linear import broadcast, causal_call, checked, read_call, sum_call
from linattn.ops.nested import checked_kind
from linattn.ops.numerics import accumulator
from linattn.ops.operators import DELTA, READ
from linattn.ops.state import LinearState


@check_types
def explain_backend(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m dv"],
    /,
    state: LinearState | Float[Tensor, "*#b d dv"] | None = None,
    *,
    beta: Float[Tensor, "*#b #m"] | None = None,
    is_causal: bool = True,
    log_decay: Float[Tensor, "*#b #m"] | Float[Tensor, "*#b m d"] | None = None,
    key_mask: Bool[Tensor, "*#b #m"] | None = None,
    normalize: str | None = "output",
    feature_map: str = "identity",
) -> str:
    """Return one line per backend: which one runs a call of `causal_linear_attention`, or of `linear_attention` if not
    `is_causal`, and for each other one the reason why it cannot, or that it can if the call names it.

    The arguments are those of the call: `q`, `k`, `v`, `key_mask`, `normalize`, `feature_map` and, only if `is_causal`,
    `state` and `log_decay`. With `beta`, the call is of `causal_delta_attention`, which takes `q`, `k`, `v`, `state`,
    `log_decay` and `key_mask`. Raises ValueError where the call would."""
    if beta is not None:
        if not is_causal or (feature_map, normalize) != ("identity", "output"):
            came = f"is_causal={is_causal}, feature_map={feature_map!r} and normalize={normalize!r}"
            raise ValueError(f"beta is of the delta rule, which is causal and has neither option, but came with {came}")
        past = None if state is None else checked_kind(state, Tensor)
        return DELTA.explain(delta_call(q, k, v, beta, past, log_decay, key_mask))
    if not is_causal and (state is not None or log_decay is not None):
        raise ValueError("state and log_decay are of causal attention, but is_causal is False")
    if is_causal:
        sums = None if state is None else checked_kind(state, LinearState)
        operator, call = causal_call(q, k, v, sums, log_decay, key_mask, normalize, feature_map)
        return operator.explain(call)
    q, k, v = checked(q, k, v, normalize, feature_map)
    keys = sum_call(k, v, key_mask, feature_map)
    broadcast(q=q.shape[:-2], keys=keys.lead)
    sizes, dtype = (k.shape[-1], v.shape[-1]), accumulator(k.dtype)
    S, z = (k.new_empty(*keys.lead, *size, dtype=dtype) for size in (sizes, sizes[:1]))
    # a form that can read the sums can also sum the keys
    return READ.explain(read_call(q, S, z, None, feature_map, v.dtype))
