"""Linear attention of features that may leave the range of their dtype: each token's features are function(x) ·
exp(log_scale), a function by name and a scale per token.

Sums over keys are divided by the exponential of a running scale, which follows the largest key so far; where it grows,
the sums decay. No later key has a part in it, so the past does not see the future."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from linattn.names import unknown_name
from linattn.ops.calls import SHORT
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.linear import causal_linear_attention, checked_decay, checked_mask, read, summarize
from linattn.ops.nested import checked_kind
from linattn.ops.numerics import accumulator, is_exporting
from linattn.ops.state import LinearState
from linattn.ops.tokens.cutting import running_max


class Features(NamedTuple):
    """The features function(x) · exp(log_scale) of each token; the scale takes up a large range.

    `x` holds f numbers per token. `function` is a name in `ELEMENTWISE`, and the operator applies it in its loop.
    `log_scale` is at least float32; None means zero. Gradients flow through `x` and `log_scale`."""

    x: Float[Tensor, "*b n f"]
    log_scale: Float[Tensor, "*b n"] | None = None
    function: str = "identity"

    def value(self) -> Float[Tensor, "*b n f"]:
        """Return the features themselves, which overflow and vanish where the formula does. float16 becomes float32."""
        x, log_scale, _ = self.evaluated()
        return x if log_scale is None else (x * log_scale.exp().unsqueeze(-1)).to(x.dtype)

    def evaluated(self) -> "Features":
        """Apply the function. Exponentials are at most 1 then, and the scale holds the rest."""
        x, log_scale, function = self.with_negative_exponents()
        if function not in ELEMENTWISE:
            raise unknown_name("function", function, ELEMENTWISE)
        return Features(ELEMENTWISE[function].function(x.to(value_dtype(x.dtype))), log_scale)

    def scalable(self) -> "Features":
        """Apply the function unless a scale can move into its argument, as it can for the identity and for exp."""
        return self if self.log_scale is None or self.function in ("identity", "exp") else self.evaluated()

    def with_negative_exponents(self) -> "Features":
        """Move the largest exponent of each token into the scale, if the function is exp."""
        if self.function != "exp":
            return self
        largest = self._largest()
        log_scale = largest if self.log_scale is None else largest + self.log_scale
        return Features(self.x - largest.unsqueeze(-1), log_scale, "exp")

    def log_size(self) -> Float[Tensor, "*b n"] | None:
        """Return the logarithm of each token's size, without gradient: of the largest feature if the function is exp,
        else of the scale. None means that no feature needs a scale."""
        if self.function != "exp":
            return None if self.log_scale is None else self.log_scale.detach()
        return self._largest() if self.log_scale is None else self._largest() + self.log_scale.detach()

    def relative_to(self, log_size: Float[Tensor, "*#b #n"] | None) -> Float[Tensor, "*b n f"]:
        """Return the argument for which `function` gives the features divided by exp(log_size). They must be
        `scalable`."""
        if log_size is None:
            return self.x
        if self.function == "exp":
            shift = log_size if self.log_scale is None else log_size - self.log_scale
            return self.x - shift.unsqueeze(-1)
        # the product has the dtype of the scale, at least float32, as the scale may be small
        return self.x if self.log_scale is None else self.x * (self.log_scale - log_size).exp().unsqueeze(-1)

    def _largest(self) -> Float[Tensor, "*b n"]:
        # any shift of the exponents gives the same product with the scale, so no gradient need flow through this one
        return self.x.detach().amax(-1).to(accumulator(self.x.dtype))


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for float16, whose range is too small for many features and their gradients."""
    return torch.float32 if dtype == torch.float16 else dtype


class FeatureState(NamedTuple):
    """The `sums` over the keys so far, of features divided by exp(log_scale). `log_scale` is −inf where there was no
    key yet, and None for features that need no scale."""

    sums: LinearState
    log_scale: Float[Tensor, "*b 1"] | None


def causal_feature_attention(
    queries: Features,
    keys: Features,
    v: Float[Tensor, "*#b n dv"],
    /,
    state: FeatureState | None = None,
    *,
    log_decay: Float[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "*#b #n"] | None = None,
    normalize: str | None = "output",
    backend: str | None = None,
) -> tuple[Float[Tensor, "*b n dv"], FeatureState]:
    """y_i = Σ_{j≤i} φ(q_i)·φ(k_j) v_j / Σ_{j≤i} φ(q_i)·φ(k_j), where the features are φ(q) = `queries` and φ(k) =
    `keys`, of any size: `causal_linear_attention` for features whose exponentials leave the range of their dtype.

    `v` holds a value per key, `state` the sums over earlier keys (None: there are none). `log_decay`, `key_mask`,
    `normalize` and `backend` are those of `causal_linear_attention`; decays per channel are for keys without a scale.
    If `normalize` is None, outputs are as large as the features, and overflow as they do; if it is "keys", as large as
    those of the query.

    Raises ValueError for shapes and names that do not fit, NotImplementedError if no backend can run the call."""
    keys = keys.scalable()
    if queries.function != keys.function:
        queries, keys = queries.evaluated(), keys.evaluated()
    keys, log_size = _masked(keys, key_mask)
    scale = end = None
    if log_size is not None and log_decay is not None:
        log_decay = _decay_per_token(log_decay, keys.x, key_mask)
        log_size = log_size.expand(torch.broadcast_shapes(log_size.shape, log_decay.shape))
    if state is not None:
        check_scale(state, log_size)
    sums, start = state or (None, None)
    if log_size is not None:
        scale, log_decay, end = running_scale(log_size, log_decay, start)
    x, query_scale = _argument(queries, normalize)
    y, sums = causal_linear_attention(
        x,
        keys.relative_to(scale),
        v,
        sums,
        log_decay=log_decay,
        key_mask=key_mask,
        normalize=normalize,
        feature_map=keys.function,
        backend=backend,
    )
    return _rescaled(y, normalize, query_scale, scale).to(v.dtype), FeatureState(sums, end)


def summarize_features(
    keys: Features, v: Float[Tensor, "*#b m dv"], /, *, key_mask: Bool[Tensor, "*#b #m"] | None = None
) -> FeatureState:
    """Return S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j), where φ(k) = `keys`, of any size, over all keys and their values
    in `v` where `key_mask` is True (None: all).

    It is the state of `read_features`, and that of `causal_feature_attention` after these keys.

    Raises ValueError for shapes and names that do not fit."""
    keys, log_size = _masked(keys.scalable(), key_mask)
    # the maximum over no keys is −inf, with a length of zero too
    scale = None if log_size is None else F.pad(log_size, (0, 1), value=-torch.inf).amax(-1, keepdim=True)
    x = keys.relative_to(None if scale is None else finite(scale))
    return FeatureState(summarize(x, v, key_mask=key_mask, feature_map=keys.function), scale)


def read_features(
    queries: Features, state: FeatureState, /, *, normalize: str | None = "output"
) -> Float[Tensor, "*b n dv"]:
    """y_i = φ(q_i) S / (φ(q_i)·z), or (φ(q_i) / z) S, or φ(q_i) S, as `normalize` is "output", "keys" or None, where
    φ(q) = `queries`, of any size: each query reads the whole `state`, which stays as it is.

    Raises ValueError for shapes and names that do not fit."""
    sums, log_scale = checked_kind(state, FeatureState)
    x, query_scale = _argument(queries, normalize)
    y = read(x, sums, normalize=normalize, feature_map=queries.function)
    return _rescaled(y, normalize, query_scale, log_scale)


def _masked(keys: Features, key_mask: Tensor | None) -> tuple[Features, Tensor | None]:
    """Return the keys and their `log_size`, with a scale of −inf where a key is missing."""
    key_mask = checked_mask(keys.x, key_mask)
    if key_mask is not None and keys.log_scale is not None:
        keys = keys._replace(log_scale=torch.where(key_mask, keys.log_scale, -torch.inf))
    log_size = keys.log_size()
    if key_mask is not None and log_size is not None:
        # not NaN, which the size of a missing key may be
        log_size = torch.where(key_mask, log_size, -torch.inf)
    return keys, log_size


def _argument(queries: Features, normalize: str | None) -> tuple[Tensor, Tensor | None]:
    """Return the argument of the function that makes queries, in range, and the scale by which their outputs must be
    multiplied, None if it is 1 or cancels."""
    x, log_scale, function = queries
    if normalize == "keys" and function == "exp":
        return x if log_scale is None else x + log_scale.unsqueeze(-1), None
    x, log_scale, _ = queries.with_negative_exponents()
    return x, None if normalize == "output" else log_scale


def _rescaled(y: Tensor, normalize: str | None, query_scale: Tensor | None, key_scale: Tensor | None) -> Tensor:
    """Multiply by the scale of the queries and, if outputs are not normalised, by that of the keys."""
    scales = [x for x in (query_scale, key_scale if normalize is None else None) if x is not None]
    return (y * sum(scales[1:], scales[0]).exp().unsqueeze(-1)).to(y.dtype) if scales else y


def _decay_per_token(log_decay: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return decays (…, n), zero for missing tokens."""
    n, sizes = k.shape[-2], tuple(log_decay.shape)
    if sizes[-1:] not in ((1,), (n,)) or (len(sizes) >= k.ndim and sizes[-2:] == k.shape[-2:]):
        raise ValueError(
            "these keys are kept in range by a scale per token, which channels that fade by themselves would not "
            f"share: log_decay must be (..., {n}), a number per head and token, but is {sizes}"
        )
    log_decay = checked_decay(log_decay)
    return log_decay if key_mask is None else torch.where(key_mask, log_decay, 0)


def check_scale(state: FeatureState, log_size: Float[Tensor, "*b n"] | None) -> None:
    """Raise ValueError unless the state's scale can be the start for keys of `log_size`."""
    log_scale = checked_kind(state, FeatureState).log_scale
    expected = None if log_size is None else (*log_size.shape[:-1], 1)
    came = None if log_scale is None else tuple(log_scale.shape)
    if came == expected:
        return
    if (
        came is None
        or expected is None
        or any(x not in (1, y) for x, y in zip(came[::-1], expected[::-1], strict=False))
    ):
        raise ValueError(
            f"the state's log_scale must be {expected} for these keys, but is {came}: it was made from other features"
        )


def finite(log_scale: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return zeros for −inf, the scale of no keys."""
    return log_scale.masked_fill(log_scale == -torch.inf, 0)


# a scale of e^−14 to e^10 serves as well as e^0: it leaves room above for sums and gradients, below for small products
_STEP, _LEAST = 24.0, -14.0
# in sums it stands for −∞, after which the differences of the numbers before would be none
_FORGETS = -1e6


def running_scale(
    log_size: Float[Tensor, "*b n"],
    log_decay: Float[Tensor, "*#b #n"] | None = None,
    start: Float[Tensor, "*b 1"] | None = None,
    /,
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"] | None, Float[Tensor, "*b 1"]]:
    """Return the scale m_i = max(m_{i−1} + log_decay_i, log_size_i) by which the sums at each token are divided, their
    decay m_{i−1} + log_decay_i − m_i, and the last m, the next call's start m_0 (None: −inf, no key yet).

    Without a log_decay, sizes are rounded to multiples of 24 first, so that decays are rare: m lies between 10 below
    and 14 above the largest size. A decay of None is zero everywhere. Where m is −inf, the returned scale is zero, and
    so is the next decay.

    No gradient passes through m: any m would give the same outputs."""
    scale = log_size.detach() if log_decay is not None else ((log_size.detach() - _LEAST) / _STEP).floor() * _STEP
    start = scale.new_tensor(-torch.inf) if start is None else start
    scale = torch.cat([start.expand(*scale.shape[:-1], 1), scale], -1)
    if log_decay is None:
        scale = _running_max(scale)
    else:
        exact = torch.float32 if scale.device.type == "mps" else torch.float64
        total = log_decay.detach().to(exact).clamp(min=_FORGETS).expand_as(log_size).cumsum(-1)
        total = torch.cat([total.new_zeros(*total.shape[:-1], 1), total], -1)
        scale = (_running_max(scale - total) + total).to(scale.dtype)
    last, none, scale = scale[..., -1:], scale == -torch.inf, finite(scale)
    # differences of the rounded maxima, so that the decays of pieces multiply exactly to that of the whole sequence
    decay = scale[..., :-1] - scale[..., 1:]
    if log_decay is not None:
        decay = log_decay + decay
        # rounding may leave it slightly above zero, where a clamp would stop the gradient of log_decay
        decay = decay - decay.detach().clamp(min=0)
    decay = decay.masked_fill(none[..., :-1], 0)
    # a copy, because a view would keep the whole sequence alive in a state of constant size
    return scale[..., 1:], None if log_decay is None and _needless(decay) else decay, last.clone()


def _running_max(x: Tensor) -> Tensor:
    if not is_exporting():
        return x.cummax(-1).values
    start = x[..., :1]
    return torch.cat([start, torch.maximum(start, running_max(x[..., 1:]))], -1)


def _needless(decay: Tensor) -> bool:
    """Return whether the decay is known to be zero. It is unknown in compilation, under vmap, or where reading it would
    wait. Short sequences keep a decay of zeros: without one they would run on another backend, which rounds otherwise,
    so that a later key would change outputs before it."""
    if torch.compiler.is_compiling() or type(decay) is not Tensor or is_functorch_wrapped_tensor(decay):
        return False
    return decay.device.type == "cpu" and not 1 < decay.shape[-1] <= SHORT and not decay.any()
