"""The laws of features with scales: every way to read them gives the same numbers, attention agrees with a definition
that takes logarithms of all weights, and a running maximum keeps to an exact log-sum-exp at sizes of which the
exponential overflows any dtype."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import (
    LinearState,
    causal_feature_attention,
    causal_linear_attention,
    linear_attention,
    read_features,
    summarize_features,
)
from linattn.ops.calls import SHORT
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.features import Features, FeatureState
from linattn.ops.scale import running_scale
from tests import laws
from tests.feature_maps.test_elementwise import FORMULAS

every_function = pytest.mark.parametrize("function", ELEMENTWISE)
with_and_without_scale = pytest.mark.parametrize("scaled", [False, True])


def features(function: str, scaled: bool, *, std: float = 1.0, dtype: torch.dtype = torch.float64) -> Features:
    x = torch.randn(2, 63, 5, dtype=torch.float64) * std
    scale = (torch.randn(2, 63) * std).to(torch.promote_types(dtype, torch.float32)) if scaled else None
    return Features(x.to(dtype), scale, function)


def formula(x: Tensor, log_scale: Tensor | None, function: str) -> Tensor:
    y = FORMULAS[function](x)
    return y if log_scale is None else y * torch.e ** log_scale.unsqueeze(-1)


@every_function
@with_and_without_scale
def test_every_form_has_the_same_value(function, scaled):
    original = features(function, scaled)
    expected = formula(*original)
    assert_close(original.value(), expected)
    for form in (original.evaluated(), original.with_negative_exponents()):
        assert_close(formula(*form), expected)
    assert original.evaluated().function == "identity"


@every_function
def test_relative_features_are_divided(function):
    original, log_size = features(function, scaled=True), torch.randn(2, 63, dtype=torch.float64)
    scalable = original.scalable()
    relative = Features(scalable.relative_to(log_size), log_size, scalable.function)
    assert_close(formula(*relative), formula(*original))
    assert original.relative_to(None) is original.x


@with_and_without_scale
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_exponential_is_one(scaled, dtype):
    original = features("exp", scaled, std=100, dtype=dtype)
    value, log_scale, _ = original.evaluated()
    assert_close(value.amax(-1), torch.ones(2, 63), check_dtype=False)
    assert log_scale is not None and log_scale.max() > 100 and torch.equal(original.log_size(), log_scale)


@every_function
@with_and_without_scale
def test_float16_becomes_float32(function, scaled):
    original = features(function, scaled, std=1000 if function == "squared_relu" else 1, dtype=torch.float16)
    value = original.value()
    assert value.dtype == torch.float32
    if not scaled:
        assert_close(value.double(), formula(original.x.double(), None, function), rtol=1e-5, atol=1e-5)


@every_function
@with_and_without_scale
def test_gradients_are_those_of_the_formula(function, scaled):
    x, log_scale, _ = features(function, scaled)
    inputs = [x.requires_grad_()] if log_scale is None else [x.requires_grad_(), log_scale.double().requires_grad_()]
    weight = torch.randn_like(x)

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((weight * value).sum(), inputs)

    original = Features(inputs[0], inputs[1] if scaled else None, function)
    assert_close(gradients(original.value()), gradients(formula(*original)))


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("decaying", [False, True])
def test_weights_are_those_of_a_softmax(size: float, decaying: bool) -> None:
    """One feature, exp(s_j): then attention is the causal softmax of s, with a decay of s minus the age."""
    n = 150
    s, v = size * torch.randn(2, n, dtype=torch.float64), torch.randn(2, n, 3, dtype=torch.float64)
    log_decay = -torch.rand(2, n, dtype=torch.float64) if decaying else None
    m, decay, _ = running_scale(s, log_decay)
    k = (s - m).exp().unsqueeze(-1)
    y, _ = causal_linear_attention(torch.ones_like(k), k, v, log_decay=decay)
    age = torch.zeros(2, n, n, dtype=torch.float64)
    if log_decay is not None:
        total = log_decay.cumsum(-1)
        age = total.unsqueeze(-1) - total.unsqueeze(-2)
    scores = (s.unsqueeze(-2) + age).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    assert_close(y, scores.softmax(-1) @ v)


@pytest.mark.parametrize("decaying", [False, True])
def test_scales_of_pieces_are_those_of_the_whole(decaying: bool) -> None:
    # without decay scales are rounded, and only large ones differ
    s = (10 if decaying else 100) * torch.randn(2, 80)
    log_decay = -torch.rand(2, 80) if decaying else None
    whole, _, end = running_scale(s, log_decay)
    start, pieces = None, []
    for part in (slice(0, 1), slice(1, 1), slice(1, 33), slice(33, 80)):
        m, _, start = running_scale(s[:, part], None if log_decay is None else log_decay[:, part], start)
        pieces.append(m)
    assert whole.unique().numel() > 2
    assert_close(torch.cat(pieces, -1), whole, rtol=1e-6, atol=1e-6 if decaying else 0)
    assert_close(start, end, rtol=1e-6, atol=1e-6 if decaying else 0)


def test_no_key_yet_is_no_scale() -> None:
    s = torch.tensor([[-torch.inf, -torch.inf, 20.0, -torch.inf, 50.0]])
    m, decay, last = running_scale(s)
    assert decay is not None
    assert m.tolist() == [[0, 0, 24, 24, 48]] and decay.tolist() == [[0, 0, 0, 0, -24]] and last.tolist() == [[48]]


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
def test_the_largest_feature_has_room_on_either_side(size: float) -> None:
    s = size * torch.randn(3, 200, dtype=torch.float64)
    m, decay, last = running_scale(s)
    largest = s.cummax(-1).values
    assert (largest - m).min() >= -14 and (largest - m).max() < 10
    assert torch.equal(last, m[:, -1:])
    shares = torch.zeros_like(m[:, 1:]) if decay is None else decay[:, 1:]
    assert torch.equal(shares, m[:, :-1] - m[:, 1:])


def test_nothing_decays_where_scales_are_moderate() -> None:
    s = torch.randn(3, 200)
    assert running_scale(s)[1] is None
    assert running_scale(s + 90)[1] is None
    assert running_scale(s, None, torch.full((3, 1), -100.0))[1] is not None
    assert running_scale(torch.full((3, 200), -torch.inf))[1] is None
    assert running_scale(s[:, :1])[1] is None


def test_short_sequences_have_a_decay_always() -> None:
    """Whether there is one chooses the backend: no later key may have a part in that."""
    for n in (2, SHORT):
        decay = running_scale(torch.randn(3, n))[1]
        assert decay is not None and not decay.any()


def test_under_vmap_scales_are_the_same() -> None:
    s = 100 * torch.randn(4, 2, 50)
    m, decay, last = torch.func.vmap(running_scale)(s)
    for i, row in enumerate(s):
        expected = running_scale(row)
        assert all(torch.equal(x[i], y) for x, y in zip((m, decay, last), expected, strict=True))


# functions of queries and keys, the standard deviation of exponents, and that of scales (None: no scale)
KINDS: dict[str, tuple[tuple[str, str], float, float | None]] = {
    "exp": (("exp", "exp"), 1.0, None),
    "large exp": (("exp", "exp"), 30.0, None),
    "scaled exp": (("exp", "exp"), 30.0, 300.0),
    "softplus": (("softplus", "softplus"), 1.0, None),
    "scaled softplus": (("softplus", "softplus"), 1.0, 300.0),
    "two functions": (("sigmoid", "exp"), 1.0, 30.0),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
N = 70


def case(kind: str, n: int = N) -> tuple[Features, Features, Tensor]:
    """Return queries (2, 2, 2, n, f), keys (2, 2, 1, n, f) and values, as grouped heads have them."""
    functions, std, scale_std = KINDS[kind]
    sides = []
    for function, heads in zip(functions, (2, 1), strict=True):
        x = std * torch.randn(2, 2, heads, n, 5, dtype=torch.float64)
        log_scale = None if scale_std is None else scale_std * torch.randn(2, 2, heads, n, dtype=torch.float64)
        sides.append(Features(x, log_scale, function))
    return sides[0], sides[1], torch.randn(2, 2, 1, n, 3, dtype=torch.float64)


def logarithm(features: Features) -> Tensor:
    x, log_scale, function = features
    log = x if function == "exp" else ELEMENTWISE[function].function(x).log()
    return log if log_scale is None else log + log_scale.unsqueeze(-1)


def definition(
    queries: Features, keys: Features, v: Tensor, *, mask: Tensor | None = None, log_decay: Tensor | None = None
) -> Tensor:
    """Normalised outputs from the logarithm of every weight."""
    n = v.shape[-2]
    log = (logarithm(queries).unsqueeze(-2) + logarithm(keys).unsqueeze(-3)).logsumexp(-1)
    if log_decay is not None:
        total = (log_decay if mask is None else log_decay * mask).cumsum(-1)
        log = log + total.unsqueeze(-1) - total.unsqueeze(-2)
    absent = ~torch.ones(n, n, dtype=torch.bool).tril()
    absent = absent if mask is None else absent | ~mask.unsqueeze(-2)
    log = log.masked_fill(absent, -torch.inf)
    # finite logarithms, as the gradient of a softmax of −inf alone is NaN
    return torch.where(log.isneginf().all(-1, keepdim=True), -1e300, log).softmax(-1).masked_fill(absent, 0) @ v


def part(features: Features, tokens: slice) -> Features:
    scale = features.log_scale
    return features._replace(x=features.x[..., tokens, :], log_scale=None if scale is None else scale[..., tokens])


@every_kind
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decaying", [False, True])
def test_attention_agrees_with_the_definition(kind: str, masked: bool, decaying: bool) -> None:
    queries, keys, v = case(kind)
    log_decay = -torch.rand(2, 2, 1, N, dtype=torch.float64) if decaying else None
    mask = laws.masks(N)["holes"].unsqueeze(2) if masked else None
    y, _ = causal_feature_attention(queries, keys, v, key_mask=mask, log_decay=log_decay)
    assert_close(y, definition(queries, keys, v, mask=mask, log_decay=log_decay), rtol=1e-6, atol=1e-9)


@every_kind
def test_gradients_agree_with_the_definition(kind: str) -> None:
    queries, keys, v = case(kind, 20)
    inputs = [x.requires_grad_() for x in (*queries[:2], *keys[:2], v) if x is not None]
    upstream = torch.randn(2, 2, 2, 20, 3, dtype=torch.float64)
    found = torch.autograd.grad(causal_feature_attention(queries, keys, v)[0], inputs, upstream, allow_unused=True)
    expected = torch.autograd.grad(definition(queries, keys, v), inputs, upstream, materialize_grads=True)
    for x, y in zip(found, expected, strict=True):
        assert_close(torch.zeros_like(y) if x is None else x, y, rtol=1e-6, atol=1e-8)


@every_kind
@pytest.mark.parametrize("normalize", ["output", "keys", None])
@pytest.mark.parametrize("decaying", [False, True])
def test_pieces_make_the_whole(kind: str, normalize: str | None, decaying: bool) -> None:
    (queries, keys, v), mask = case(kind), laws.masks(N)["holes"].unsqueeze(2)
    if normalize != "output":
        # what is not normalised is as large as its features
        queries, keys = (
            Features(f.x / 30, None if f.log_scale is None else f.log_scale / 300, f.function) for f in (queries, keys)
        )
    log_decay = -torch.rand(2, 2, 1, N, dtype=torch.float64) if decaying else None
    whole, end = causal_feature_attention(queries, keys, v, key_mask=mask, log_decay=log_decay, normalize=normalize)
    for cuts in ((0, 1, 2, 40, N), (0, 0, 65, N), (0, 30, *range(50, N + 1))):
        state, ys = None, []
        for tokens in itertools.starmap(slice, itertools.pairwise(cuts)):
            y, state = causal_feature_attention(
                part(queries, tokens),
                part(keys, tokens),
                v[..., tokens, :],
                state,
                key_mask=mask[..., tokens],
                log_decay=None if log_decay is None else log_decay[..., tokens],
                normalize=normalize,
            )
            ys.append(y)
        assert_close(torch.cat(ys, -2), whole, rtol=1e-6, atol=1e-9)
        assert state is not None
        assert_close(state, end, rtol=1e-6, atol=1e-9)


@every_kind
def test_features_may_be_scaled(kind: str) -> None:
    queries, keys, v = case(kind)
    queries, keys = (f._replace(log_scale=f.x.sum(-1) if f.log_scale is None else f.log_scale) for f in (queries, keys))
    y, state = causal_feature_attention(queries, keys, v)
    for constant in (-1000.0, 3.0, 1000.0):
        more_q, more_k = (
            f._replace(log_scale=f.log_scale + constant) for f in (queries, keys) if f.log_scale is not None
        )
        assert_close(causal_feature_attention(more_q, more_k, v)[0], y)
        assert_close(read_features(more_q, state), read_features(queries, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exponents_that_leave_float32_do_not_overflow(dtype: torch.dtype) -> None:
    """One feature: any query gives the causal softmax of the keys' exponents."""
    k, v = (200 * torch.randn(2, 300, 1)).to(dtype), torch.randn(2, 300, 3).to(dtype)
    queries, keys, v = Features(-k, function="exp"), Features(k.requires_grad_(), function="exp"), v.requires_grad_()
    y, state = causal_feature_attention(queries, keys, v)
    exact = k.double().mT.expand(2, 300, 300).masked_fill(~torch.ones(300, 300, dtype=torch.bool).tril(), -torch.inf)
    assert y.dtype == dtype and state.sums.S.dtype == torch.float32
    error = 1e-4 if dtype == torch.float32 else 0.02
    assert_close(y.double(), exact.softmax(-1) @ v.double(), rtol=error, atol=error)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.float().sum(), (k, v)))


@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize("decaying", [False, True])
def test_a_huge_future_key_leaves_the_past_bitwise_as_it_was(n: int, decaying: bool) -> None:
    q, k, v = laws.tokens(n, dtype=torch.float32)
    log_decay = -torch.rand(3, n) if decaying else None

    def attend(k: Tensor) -> Tensor:
        keys = Features(k, -k.sum(-1), "exp")
        return causal_feature_attention(Features(q, function="exp"), keys, v, log_decay=log_decay)[0]

    before, at = attend(k), n - 40
    for factor in (10, 1000):
        after = attend(torch.cat([k[..., :at, :], factor * k[..., at:, :]], -2))
        assert torch.equal(after[..., :at, :], before[..., :at, :])
        assert after.isfinite().all()


@every_kind
@pytest.mark.parametrize("masked", [False, True])
def test_a_summary_is_the_state_of_either_form(kind: str, masked: bool) -> None:
    (queries, keys, v), mask = case(kind), laws.masks(N)["left"].unsqueeze(2) if masked else None
    first, rest, cut = slice(0, 50), slice(50, N), None if mask is None else mask[..., :50]
    state = summarize_features(part(keys, first), v[..., first, :], key_mask=cut)
    whole, end = causal_feature_attention(queries, keys, v, key_mask=mask)
    y, _ = causal_feature_attention(
        part(queries, rest),
        part(keys, rest),
        v[..., rest, :],
        state,
        key_mask=None if mask is None else mask[..., rest],
    )
    assert_close(y, whole[..., rest, :], rtol=1e-6, atol=1e-9)
    last = part(queries, slice(N - 1, N))
    for state in (end, summarize_features(keys, v, key_mask=mask)):
        assert_close(read_features(last, state), whole[..., -1:, :], rtol=1e-6, atol=1e-9)


def test_no_keys() -> None:
    queries, keys, v = case("large exp")
    state = summarize_features(part(keys, slice(0)), v[..., :0, :])
    assert state.log_scale is not None and state.log_scale.isneginf().all()
    for normalize in ("output", "keys", None):
        assert not read_features(queries, state, normalize=normalize).any()
    missing = torch.zeros(2, 1, 1, N, dtype=torch.bool)
    spoilt = keys._replace(x=torch.full_like(keys.x, torch.nan))
    y, state = causal_feature_attention(queries, spoilt, v, key_mask=missing)
    assert not y.any() and state.log_scale is not None and state.log_scale.isneginf().all()


@pytest.mark.parametrize("normalize", ["output", "keys"])
@pytest.mark.parametrize("largest", range(0, 24, 3))
def test_channels_far_below_the_largest_key_count(normalize: str, largest: int) -> None:
    """57 below, as the docs say, wherever the rounded scale lies."""
    q, k, v = torch.tensor([-300.0, 0.0]).expand(5, 2), torch.tensor([0.0, -57.0]).expand(5, 2), torch.ones(5, 1)
    queries, keys = Features(q, function="exp"), Features(k + largest, function="exp")
    y, _ = causal_feature_attention(queries, keys, v, normalize=normalize)
    assert_close(y, v)


def test_without_scales_it_is_the_operator() -> None:
    q, k, v = laws.tokens(50, positive=True)
    y, (sums, log_scale) = causal_feature_attention(Features(q), Features(k), v)
    expected, state = causal_linear_attention(q, k, v)
    assert torch.equal(y, expected) and log_scale is None
    assert_close(sums, state, rtol=0, atol=0)
    assert_close(read_features(Features(q), summarize_features(Features(k), v)), linear_attention(q, k, v))


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused() -> None:
    queries, keys, v = case("scaled exp")
    plain = Features(keys.x)
    state, four = summarize_features(plain, v), torch.ones(4, 1, N)
    deeper = summarize_features(Features(keys.x[None], function="exp"), v[None])
    calls: list[tuple[Any, str]] = [
        (lambda: causal_feature_attention(queries, keys, v, state), r"log_scale must be \(2, 2, 1, 1\) .* but is None"),
        (lambda: causal_feature_attention(plain, plain, v, summarize_features(keys, v)), "must be None for these"),
        (lambda: causal_feature_attention(queries, keys, v, log_decay=-keys.x.abs()), "a scale per token"),
        (lambda: causal_feature_attention(queries, keys, v, log_decay=torch.ones(N)), "must not be positive"),
        (lambda: causal_feature_attention(queries, keys, v, key_mask=torch.ones(N)), "key_mask must be boolean"),
        (lambda: causal_feature_attention(queries, keys._replace(function="sine"), v), "function must be"),
        (lambda: causal_feature_attention(queries, keys, v, key_mask=four.bool()), "must broadcast, but are keys"),
        (lambda: causal_feature_attention(queries, keys, v, log_decay=-four), "must broadcast, but are keys"),
        (lambda: causal_feature_attention(queries, keys, v, deeper), r"log_scale must be \(2, 2, 1, 1\)"),
        (lambda: summarize_features(keys._replace(log_scale=four), v), "must broadcast, but are x"),
        (lambda: read_features(queries._replace(log_scale=four), state, normalize=None), "must broadcast, but are x"),
        (lambda: read_features(queries, LinearState(v, v)), "must be a FeatureState"),  # pyright: ignore[reportArgumentType]
        (lambda: read_features(queries, FeatureState(state.sums, None), normalize="rows"), "normalize must be"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
