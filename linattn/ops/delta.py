"""The delta rule: a token predicts its value from the state and its key, and adds the error, times β, to the state:

    S_t = α_t S_{t−1} + β_t k_t (v_t − (α_t S_{t−1})ᵀ k_t)ᵀ        y_t = S_tᵀ q_t

DeltaNet, https://arxiv.org/abs/2406.06484, has α_t = 1, gated DeltaNet, https://arxiv.org/abs/2412.06464, a number per
head, and Kimi Delta Attention, https://arxiv.org/abs/2510.26692, one per channel. In the generalized delta rule of
RWKV-7, https://arxiv.org/abs/2503.14456, the key of the prediction is another than that of the write."""

from numbers import Real

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.checks import check_tensors, on_one_device
from linattn.ops.calls import DeltaCall
from linattn.ops.linear import broadcast, checked, checked_decay, checked_mask, expanded, per_channel, shape
from linattn.ops.numerics import accumulator, align, expand, summable, zero_masked, zero_masked_tokens
from linattn.ops.operators import DELTA


def causal_delta_attention(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b n d"],
    v: Float[Tensor, "*#b n dv"],
    beta: Float[Tensor, "*#b #n"],
    /,
    state: Float[Tensor, "*#b d dv"] | None = None,
    *,
    # (…, n), or (…, n, d): one annotation for both would take either for the other
    log_decay: Float[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "*#b #n"] | None = None,
    removal_key: Float[Tensor, "*#b n d"] | None = None,
    scale: float = 1.0,
    backend: str | None = None,
) -> tuple[Float[Tensor, "*b n dv"], Float[Tensor, "*c d dv"]]:
    """Update the `state` (None: zeros) with the keys in `k` by the gated delta rule, and read it with the queries in
    `q`: S_t = diag(α_t) S_{t−1} + β_t k_t (v_t − (diag(α_t) S_{t−1})ᵀ k_t)ᵀ and y_t = `scale` · S_tᵀ q_t.

    `v` holds a value and `beta` a number per key. With β = 1 and a key of length 1 the new state predicts v exactly;
    with β = 0 nothing is added; β above 1 overshoots. A key with β|k|² > 2 makes states grow: normalize keys. α =
    exp(`log_decay`), with numbers ≤ 0 (None: zeros): one per channel if `log_decay` has k's last two sizes and at least
    as many dimensions as k, otherwise one per token. `key_mask` is True for each present token (None: all); leading
    dimensions broadcast. `removal_key` holds a key r per token, which reads the prediction in place of k:
    S_t = diag(α_t) S_{t−1} + β_t k_t (v_t − (diag(α_t) S_{t−1})ᵀ r_t)ᵀ. `backend` is a name that `explain_backend`
    lists if it is called with `beta`, or None: the first that can run.

    A masked token is a missing one: the state stays as it is. A log decay of −inf, or of −10⁴ and less, begins a new
    sequence. A positive one raises an error on a CPU, but is not checked on a GPU or in a compiled graph. The state is
    float32, or float64 for float64 inputs, with the leading dimensions of all tensors but the queries.

    NaN in a present token reaches all later ones, and on a GPU the earlier ones of its chunk of up to 32 tokens: mask
    the tokens of documents that may hold NaN.

    Raises ValueError for shapes and dtypes that do not fit, NotImplementedError if no backend can run the call."""
    call = delta_call(q, k, v, beta, state, log_decay, key_mask, removal_key, scale)
    y, S = DELTA.choose(call, backend)(call)
    return y, S


def delta_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    removal_key: Tensor | None = None,
    scale: float = 1.0,
) -> DeltaCall:
    """Return checked arguments in the shapes of a `DeltaCall`, with zeros in the place of masked tokens."""
    q, k, v = checked(q, k, v, None, "identity")
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"a causal call needs a query for every key, but q is {shape(q)} and k is {shape(k)}")
    # a float passes at the first comparison, in 0.03 µs
    if type(scale) is not float and (isinstance(scale, bool) or not isinstance(scale, (Real, torch.SymFloat))):
        raise ValueError(f"scale must be a number, but is {scale!r}")
    beta = expanded(k, summable(beta, "beta"), "beta").unsqueeze(-1)
    log_decay = None if log_decay is None else per_channel(k, log_decay)
    removal_key = None if removal_key is None else _checked_removal_key(k, removal_key)
    (n, d), dv = k.shape[-2:], v.shape[-1]
    if state is not None:
        if not on_one_device(k, state, state):
            check_tensors(k=k, state=state)
        _check_state(state, d, dv, accumulator(k.dtype))
    key_mask = checked_mask(k, key_mask)
    if key_mask is not None:
        q, k, v = zero_masked_tokens(q, k, v, key_mask)
        beta = zero_masked(beta, key_mask)
        log_decay = None if log_decay is None else zero_masked(log_decay, key_mask)
        removal_key = None if removal_key is None else zero_masked(removal_key, key_mask)
    sides = {"k": k, "v": v, "beta": beta, "log_decay": log_decay, "removal_key": removal_key, "state": state}
    keys = broadcast(**{name: x.shape[:-2] for name, x in sides.items() if x is not None})
    lead = broadcast(q=q.shape[:-2], keys=keys)
    keys, ndim = (1,) * (len(lead) - len(keys)) + keys, len(lead) + 2
    if log_decay is not None:
        log_decay = align(checked_decay(log_decay), ndim)
    S = k.new_zeros(*keys, d, dv, dtype=accumulator(k.dtype)) if state is None else state
    k, v, beta = align(k, ndim), align(v, ndim), align(beta, ndim)
    removal_key = None if removal_key is None else align(removal_key, ndim)
    return DeltaCall(expand(q, (*lead, n, d)), k, v, beta, expand(S, (*keys, d, dv)), log_decay, removal_key, scale)


def _checked_removal_key(k: Tensor, removal_key: Tensor) -> Tensor:
    """Return the removal keys in the dtype of the keys k."""
    if not on_one_device(k, removal_key, removal_key):
        check_tensors(k=k, removal_key=removal_key)
    if removal_key.shape[-2:] != k.shape[-2:] or not removal_key.dtype.is_floating_point:
        came = f"{shape(removal_key)} of {removal_key.dtype}"
        raise ValueError(f"removal_key must be floating-point and, as k is {shape(k)}, (..., n, d), but is {came}")
    return removal_key.to(k.dtype)


def _check_state(state: Tensor, d: int, dv: int, dtype: torch.dtype) -> None:
    if state.shape[-2:] != (d, dv) or state.dtype != dtype:
        came = f"{shape(state)} of {state.dtype}"
        raise ValueError(f"the state must be (..., {d}, {dv}) of {dtype} for these inputs, but is {came}")
