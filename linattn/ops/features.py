"""Linear attention of features that may leave the range of their dtype. The features of a token are function(x) ·
exp(log_scale), with a function that is given by name and one scale per token.

Sums over keys are divided by the exponential of a running scale, which follows the largest key so far; where it grows,
the sums decay. It depends on no later key, so outputs do not either."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.checks import check_floating, check_tensors, on_one_device
from linattn.names import unknown_name
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.linear import broadcast, causal_linear_attention, checked_decay, checked_mask, read, summarize
from linattn.ops.nested import checked_kind
from linattn.ops.numerics import accumulator
from linattn.ops.scale import finite, running_scale
from linattn.ops.state import LinearState


class Features(NamedTuple):
    """The features function(x) · exp(log_scale) of each token; `log_scale` keeps the numbers in x in range.

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
        """Return equal Features with the identity as function. For exp, the scale first takes the largest exponents."""
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
        """Return the logarithm of each token's size, without gradient: its largest feature if the function is exp,
        otherwise its scale. None means that no feature needs a scale."""
        if self.function != "exp":
            return None if self.log_scale is None else self.log_scale.detach()
        return self._largest() if self.log_scale is None else self._largest() + self.log_scale.detach()

    def relative_to(self, log_size: Float[Tensor, "*#b #n"] | None) -> Float[Tensor, "*b n f"]:
        """Return x' for which function(x') = features / exp(log_size) (None: 1). The features must be `scalable`."""
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
    """Return the dtype, but float32 for float16, whose range is too small for many features and their gradients."""
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
    """y_i = Σ_{j≤i} φ(q_i)·φ(k_j) v_j / Σ_{j≤i} φ(q_i)·φ(k_j), where φ(q) = `queries` and φ(k) = `keys`:
    `causal_linear_attention` for features whose exponentials may leave the range of their dtype.

    `v` holds a value per key, `state` the sums over earlier keys (None: there are none). `log_decay`, `key_mask`,
    `normalize` and `backend` are as in `causal_linear_attention`; decays per channel need keys without a scale. If
    `normalize` is None, outputs overflow where φ(q)·φ(k) does; if it is "keys", where φ(q) does.

    Raises ValueError for shapes and names that do not fit, NotImplementedError if no backend can run the call."""
    queries, keys = checked_features("queries", queries), checked_features("keys", keys).scalable()
    check_floating(v=v)
    if queries.function != keys.function:
        queries, keys = queries.evaluated(), keys.evaluated()
    keys, log_size = _masked(keys, key_mask)
    scale = end = None
    if log_size is not None and log_decay is not None:
        log_decay = decay_per_token(log_decay, keys.x, key_mask)
        log_size = log_size.expand(broadcast(keys=log_size.shape, log_decay=log_decay.shape))
    sums, start = (None, None) if state is None else _checked_parts(state, keys.x)
    if state is not None:
        check_scale(state, log_size)
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
    """Return S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j), where φ(k) = `keys`, of any magnitude, over all keys and their
    values in `v` where `key_mask` is True (None: all).

    `read_features` reads this state, and `causal_feature_attention` continues from it with later keys.

    Raises ValueError for shapes and names that do not fit."""
    keys, log_size = _masked(checked_features("keys", keys).scalable(), key_mask)
    # the maximum over no keys is −inf, with a length of zero too
    scale = None if log_size is None else F.pad(log_size, (0, 1), value=-torch.inf).amax(-1, keepdim=True)
    x = keys.relative_to(None if scale is None else finite(scale))
    return FeatureState(summarize(x, v, key_mask=key_mask, feature_map=keys.function), scale)


def read_features(
    queries: Features, state: FeatureState, /, *, normalize: str | None = "output"
) -> Float[Tensor, "*b n dv"]:
    """y_i = φ(q_i) S / (φ(q_i)·z), or (φ(q_i) / z) S, or φ(q_i) S, as `normalize` is "output", "keys" or None, where
    φ(q) = `queries`, of any magnitude: each query reads the whole `state`, which stays as it is.

    Raises ValueError for shapes and names that do not fit."""
    x, query_scale = _argument(checked_features("queries", queries), normalize)
    sums, log_scale = _checked_parts(state, x)
    y = read(x, sums, normalize=normalize, feature_map=queries.function)
    return _rescaled(y, normalize, query_scale, log_scale)


def checked_features(name: str, x: Features) -> Features:
    """Return `x`. Raise ValueError, with its `name`, unless it is a Features of tensors on one device, whose shapes
    fit."""
    if not isinstance(x, Features):
        raise ValueError(f"{name} must be Features, as a feature map returns them, but is a {type(x).__name__}")
    _check_scaled(x.x, x.log_scale)
    if x.log_scale is not None:
        broadcast(x=x.x.shape[:-1], log_scale=x.log_scale.shape)
    return x


def _checked_parts(state: FeatureState, x: Tensor) -> FeatureState:
    """Return the state. Raise ValueError unless it is a FeatureState whose scale is None or on the device of x."""
    _check_scaled(x, checked_kind(state, FeatureState).log_scale)
    return state


def _check_scaled(x: Tensor, log_scale: Tensor | None) -> None:
    scale = x if log_scale is None else log_scale
    if not on_one_device(x, x, scale):
        check_tensors(x=x, log_scale=scale)


def _masked(keys: Features, key_mask: Tensor | None) -> tuple[Features, Tensor | None]:
    """Return the keys and their `log_size`. The size of a masked key, and its scale unless None, is −inf."""
    key_mask = checked_mask(keys.x, key_mask)
    if key_mask is None:
        return keys, keys.log_size()
    broadcast(keys=keys.x.shape[:-1], key_mask=key_mask.shape)
    if keys.log_scale is not None:
        keys = keys._replace(log_scale=torch.where(key_mask, keys.log_scale, -torch.inf))
    log_size = keys.log_size()
    # not NaN, which the size of a missing key may be
    return keys, None if log_size is None else torch.where(key_mask, log_size, -torch.inf)


def _argument(queries: Features, normalize: str | None) -> tuple[Tensor, Tensor | None]:
    """Return (x, s) for which function(x) · exp(s) are the queries. s is None if it is zero, or if it cancels because
    `normalize` is "output". Exponentials are at most 1 unless `normalize` is "keys"."""
    x, log_scale, function = queries
    if normalize == "keys" and function == "exp":
        return x if log_scale is None else x + log_scale.unsqueeze(-1), None
    x, log_scale, _ = queries.with_negative_exponents()
    return x, None if normalize == "output" else log_scale


def _rescaled(y: Tensor, normalize: str | None, query_scale: Tensor | None, key_scale: Tensor | None) -> Tensor:
    """Multiply outputs y by exp(query_scale) and, if `normalize` is None, also by exp(key_scale); None counts as 0."""
    scales = [x for x in (query_scale, key_scale if normalize is None else None) if x is not None]
    return (y * sum(scales[1:], scales[0]).exp().unsqueeze(-1)).to(y.dtype) if scales else y


def decay_per_token(log_decay: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return log decays (…, n), zero for missing tokens. Raise ValueError for decays per channel of the keys k."""
    check_tensors(keys=k, log_decay=log_decay)
    n, sizes = k.shape[-2], tuple(log_decay.shape)
    if sizes[-1:] not in ((1,), (n,)) or (len(sizes) >= k.ndim and sizes[-2:] == k.shape[-2:]):
        raise ValueError(
            "these keys are kept in range by a scale per token, which channels that fade by themselves would not "
            f"share: log_decay must be (..., {n}), a number per head and token, but is {sizes}"
        )
    log_decay = checked_decay(log_decay)
    return log_decay if key_mask is None else torch.where(key_mask, log_decay, 0)


def check_scale(state: FeatureState, log_size: Float[Tensor, "*b n"] | None) -> None:
    """Raise ValueError unless the state's log_scale is (*b, 1) for the keys' `log_size` (*b, n), or both are None."""
    log_scale = checked_kind(state, FeatureState).log_scale
    expected = None if log_size is None else (*log_size.shape[:-1], 1)
    came = None if log_scale is None else tuple(log_scale.shape)
    fits = came == expected
    if came and expected:
        sizes = zip(came[::-1], expected[::-1], strict=False)
        fits = len(came) <= len(expected) and all(x in (1, y) for x, y in sizes)
    if not fits:
        raise ValueError(
            f"the state's log_scale must be {expected} for these keys, but is {came}: it was made from other features"
        )
