import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from linattn.attention import (
    ATTENTIONS,
    Decay,
    LinearAttention,
    LocalAttention,
    SoftmaxAttention,
    SplitHeads,
    attend,
    named_attention,
    traits,
)
from linattn.feature_maps import (
    FEATURE_MAPS,
    FavorFeatureMap,
    HyperbolicFavorFeatureMap,
    TaylorFeatureMap,
    TrigonometricFavorFeatureMap,
)
from linattn.nn import HeadNorm
from tests.attention.cases import CAUSAL, GATED, GLOBAL, over

LEARNED = [name for name in ATTENTIONS if traits(name).learned and not traits(name).gated]
CALLABLE = [(name, causal) for name, causal in CAUSAL + GLOBAL if not (traits(name).learned or traits(name).gated)]


def make(spec: str, *, num_heads: int = 8, num_key_heads: int | None = None, head_dim: int = 4, **options):
    return named_attention(spec, num_heads=num_heads, num_key_heads=num_key_heads, head_dim=head_dim, **options)


def some_heads(n: int = 30) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, h, n, 8) for h in (4, 2, 2))


def test_every_feature_map_has_its_name():
    for name in FEATURE_MAPS:
        inner = make(name)
        assert isinstance(inner, LinearAttention) and not inner.causal and make(name, causal=True).causal


def test_mixtures():
    for spec, heads in (("local+elu", (4, 4)), ("local:2+elu:6", (2, 6)), ("local:1 + elu:3 + softmax:4", (1, 3, 4))):
        inner = make(spec, window=7)
        assert isinstance(inner, SplitHeads) and inner.heads == heads
        assert isinstance(inner.parts[0], LocalAttention) and inner.parts[0].window.size == 7
    assert isinstance(make("softmax:8"), SoftmaxAttention)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("nothing", {}, "'nothing' is no attention: there are .*elu"),
        ("", {}, "is no attention"),
        ("local:3+elu:4", {}, "has 7 heads, but num_heads is 8"),
        ("local:3+elu", {}, "number all parts of a mixture"),
        ("local:x+elu:4", {}, "number all parts of a mixture"),
        ("local:0+elu:8", {}, "number all parts of a mixture"),
        ("local+elu+relu", {}, "8 heads do not split equally"),
        ("local:3+elu:5", {"num_key_heads": 4}, "do not divide 4 key heads evenly"),
        ("linformer", {}, "give max_length"),
        ("linformer", {"causal": True, "max_length": 9}, "cannot be causal"),
        ("retention", {}, "retention is causal only"),
        ("gated_delta", {}, "gated_delta is causal only"),
        ("local", {"window": 0}, "window must be a whole number of at least 1, but is 0"),
        ("elu", {"num_heads": 0}, "num_heads must be a whole number of at least 1, but is 0"),
        ("favor", {"head_dim": 0}, "head_dim must be a whole number of at least 1, but is 0"),
        (3, {}, "spec must be a string, but is 3"),
    ],
)
def test_errors(spec, options, message):
    with pytest.raises(ValueError, match=message):
        make(spec, **options)


def test_attend_by_softmax_is_torchs():
    q, k, v = some_heads()
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        assert_close(attend(q, k, v, "softmax", is_causal=causal), expected)


@pytest.mark.parametrize("length", [1, 65])
def test_retention_is_the_papers(length):
    """(Q Kᵀ / √d ⊙ D) V with D_nm = γ^(n−m), γ = 1 − 2^(−5−i) for head i: equations 5 and 8 and the scale of section
    2.2 of https://arxiv.org/abs/2307.08621."""
    q, k, v = torch.randn(3, 2, 4, length, 6, dtype=torch.float64)
    place = torch.arange(length)
    age = (place[:, None] - place).double()
    gamma = 1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64))
    fade = (gamma[:, None, None] ** age).tril()
    expected = (q @ k.mT / 6**0.5 * fade) @ v
    # the decays of the module are float32 numbers
    assert_close(attend(q, k, v, "retention", is_causal=True), expected, rtol=1e-5, atol=1e-5)
    retention = make("retention", num_heads=4, causal=True)
    retention.decay.log_decay = gamma.log()
    assert_close(retention(q, k, v), expected)


@pytest.mark.parametrize("learned", [False, True])
def test_decays_of_many_heads_are_the_papers(learned):
    """log(1 − 2^(−5−i)), which float32 has also where it cannot tell 1 − 2^(−5−i) from 1."""
    decay = Decay(100, learned=learned)
    lost = 2.0 ** (-5 - torch.arange(100, dtype=torch.float64))
    found = decay()
    assert_close(found.squeeze(-1).double(), torch.log1p(-lost), rtol=2e-5, atol=0)
    if learned:
        # each head can learn
        (gradient,) = torch.autograd.grad(found.log1p().sum(), decay.w)
        assert gradient.count_nonzero() == 100


@pytest.mark.parametrize("method", ["softmax", "elu", "favor"])
def test_dimensions_before_the_heads_broadcast_as_in_torch(method):
    q, k, v = torch.randn(2, 3, 4, 5, 8), torch.randn(1, 3, 4, 6, 8), torch.randn(3, 4, 6, 7)[None, :1]
    y = attend(q, k, v, method)
    for i in range(2):
        for j in range(3):
            assert_close(y[i, j], attend(q[i, j], k[0, j], v[0, 0], method))
    if method == "softmax":
        assert_close(y, F.scaled_dot_product_attention(q, k, v))
    # as many rows, but others
    for x in (torch.randn(3, 2, 4, 6, 8), torch.randn(2, 2, 4, 6, 8)):
        with pytest.raises(ValueError, match=r"leading dimensions must broadcast, but are q \(2, 3\), k"):
            attend(q, x, x, method)


@pytest.mark.parametrize("sizes", [(2_000, 1e-4), (1e-4, 2_000)])
@pytest.mark.parametrize("scale", [20.0, -20.0])
def test_a_scale_leaves_the_range_of_half_precision_nowhere(sizes, scale):
    q, k, v = torch.randn(1, 1, 4, 8) * sizes[0], torch.randn(1, 1, 4, 8) * sizes[1], torch.randn(1, 1, 4, 8)
    q, k, v = (x.half() for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    assert_close(attend(q, k, v, "softmax", scale=scale).double(), expected, rtol=0, atol=2e-2)


def test_a_norm_of_each_head_undoes_the_scale_of_retention():
    """Where that has no epsilon. Bit by bit with 64 channels, whose scale is a power of two."""
    q, k, v = torch.randn(3, 2, 4, 65, 64)
    scaled = named_attention("retention", num_heads=4, head_dim=64, causal=True)
    plain = LinearAttention(FEATURE_MAPS["identity"](64, 4, 4), causal=True, normalize=None, decay=scaled.decay)
    assert torch.equal(8 * scaled(q, k, v), plain(q, k, v))
    norm = HeadNorm(64, eps=0.0)
    assert torch.equal(norm(scaled(q, k, v)), norm(plain(q, k, v)))


@over(CALLABLE)
def test_attend_takes_every_method_that_needs_no_training(spec, causal):
    q, k, v = some_heads()
    y = attend(q, k, v, spec, is_causal=causal)
    assert y.shape == q.shape and y.dtype == q.dtype and torch.isfinite(y).all()
    assert torch.equal(y, attend(q, k, v, spec, is_causal=causal)), "random features come from a fixed seed"


@pytest.mark.parametrize("name", LEARNED)
def test_attend_refuses_what_needs_training(name):
    with pytest.raises(ValueError, match="build the module with named_attention"):
        attend(*some_heads(), name, is_causal=not traits(name).bidirectional)


@pytest.mark.parametrize("name", GATED)
def test_attend_refuses_what_needs_gates(name):
    with pytest.raises(ValueError, match=f"'{name}' needs gates, .*: build MultiheadAttention"):
        attend(*some_heads(), name, is_causal=True)


def test_attend_draws_nothing_from_the_callers_generator():
    x, before = some_heads(), torch.get_rng_state()
    attend(*x, "favor")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_attend_has_the_same_features_in_vmap(randomness):
    q, k, v = some_heads()
    mapped = torch.func.vmap(lambda *x: attend(*x, "favor"), randomness=randomness)
    assert_close(mapped(q, k, v), attend(q, k, v, "favor"))
    gradient = torch.func.grad(lambda *x: mapped(*x).square().sum())
    assert_close(gradient(q, k, v), torch.func.grad(lambda *x: attend(*x, "favor").square().sum())(q, k, v))


def test_attend_seeds_no_other_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the caller's random state changes"))
    attend(*some_heads(), "favor")


def test_attend_takes_modules():
    q, k, v = some_heads()
    local = LocalAttention(3, causal=True)
    assert_close(attend(q, k, v, local, is_causal=True), local(q, k, v))
    assert_close(attend(q, k, v, TaylorFeatureMap()), attend(q, k, v, "taylor"))
    with pytest.raises(ValueError, match="is_causal is False, but LocalAttention was made with causal=True"):
        attend(q, k, v, LocalAttention(3, causal=True))


def test_attend_with_more_or_fewer_dimensions():
    q, k, v = torch.randn(3, 2, 5, 4, 30, 8)
    y = attend(q, k, v, "local+elu", is_causal=True)
    assert_close(attend(q[0], k[0], v[0], "local+elu", is_causal=True), y[0])
    assert_close(attend(q[0, 1], k[0, 1], v[0, 1], "local+elu", is_causal=True), y[0, 1])
    one = attend(q[0, 1, 2], k[0, 1, 2], v[0, 1, 2], "elu", is_causal=True)
    assert_close(one, attend(q, k, v, "elu", is_causal=True)[0, 1, 2])
    with pytest.raises(ValueError, match="the same number of dimensions"):
        attend(q, k[0], v[0])


def test_attend_with_masks_of_any_shape():
    q, k, v = some_heads()
    key_mask = torch.rand(2, 30) < 0.5
    expected = make("elu", num_heads=4, num_key_heads=2)(q, k, v, key_mask=key_mask[:, None])
    assert_close(attend(q, k, v, key_mask=key_mask), expected)
    assert_close(attend(q, k, v, key_mask=key_mask[:, None]), expected)
    assert_close(attend(q, k, v, key_mask=key_mask[:, None].expand(2, 2, 30)), expected)
    assert_close(attend(q[0], k[0], v[0], key_mask=key_mask[0]), expected[0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(2, 29), (3, 30), (2, 3, 30), (1, 2, 2, 30)])
def test_attend_says_which_masks_there_are(shape):
    with pytest.raises(ValueError, match=r"key_mask must be \(2, 2, 30\), .* but is"):
        attend(*some_heads(), key_mask=torch.ones(shape, dtype=torch.bool))


@over(CAUSAL + GLOBAL)
def test_attend_takes_a_scale_where_products_have_one(spec, causal):
    facts = traits(spec)
    if facts.learned or facts.gated:
        return
    q, k, v = some_heads()
    if not named_attention(spec, num_heads=4, head_dim=8, causal=causal, max_length=30).scales_products:
        with pytest.raises(ValueError, match="scale multiplies q·k, but"):
            attend(q, k, v, spec, is_causal=causal, scale=0.3)
        return
    expected = attend(q, k, v, spec, is_causal=causal)
    assert_close(attend(q, k, v, spec, is_causal=causal, scale=q.shape[-1] ** -0.5), expected)
    assert not torch.allclose(attend(q, k, v, spec, is_causal=causal, scale=0.9), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_multiplies_products(causal):
    q, k, v = (x.double() for x in some_heads())
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, is_causal=causal, enable_gqa=True)
    assert_close(attend(q, k, v, "softmax", is_causal=causal, scale=0.3), expected)
    s = 0.3 * q @ k.repeat_interleave(2, 1).mT
    weights = 1 + s + s.square() / 2
    weights = weights.tril() if causal else weights
    expected = weights @ v.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True)
    assert_close(attend(q, k, v, "taylor2", is_causal=causal, scale=0.3), expected)


@pytest.mark.parametrize("features", [FavorFeatureMap, HyperbolicFavorFeatureMap, TrigonometricFavorFeatureMap])
def test_random_features_estimate_softmax_of_any_scale(features):
    q, k, v = torch.randn(3, 1, 1, 20, 4, dtype=torch.float64) / 4
    y = attend(q, k, v, features(4, 20000).double(), scale=0.8)
    assert_close(y, F.scaled_dot_product_attention(q, k, v, scale=0.8), rtol=0, atol=0.02)


def test_a_mask_of_keys_for_each_head_is_not_one_for_each_row():
    q, k, v = torch.randn(3, 2, 2, 30, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, 30) < 0.5
    assert_close(attend(q, k, v, "softmax", attn_mask=mask), F.scaled_dot_product_attention(q, k, v, mask))
    assert_close(attend(q, k, v, attn_mask=mask), attend(q, k, v, key_mask=mask.squeeze(1)[None]))


@pytest.mark.usefixtures("unchecked")
def test_attend_takes_the_masks_and_windows_that_it_can():
    q, k, v = some_heads()
    key_mask = torch.rand(2, 30) < 0.5
    expected = attend(q, k, v, key_mask=key_mask)
    assert torch.equal(attend(q, k, v, attn_mask=key_mask[:, None, None]), expected)
    for mask in (key_mask, key_mask[:, None, None].float(), torch.ones(30, 30, dtype=torch.bool).tril(), key_mask[0]):
        with pytest.raises(ValueError, match=r"attn_mask must be .* key_mask, .* is_causal=True, .* need scaled_dot"):
            attend(q, k, v, attn_mask=mask)
    with pytest.raises(ValueError, match="key_mask or attn_mask"):
        attend(q, k, v, key_mask=key_mask, attn_mask=key_mask[:, None, None])
    local = LocalAttention(3, causal=True)
    assert_close(attend(q, k, v, "local", is_causal=True, window=3), local(q, k, v))
    for method in ("softmax", "elu", local):
        with pytest.raises(ValueError, match="window is that of local heads"):
            attend(q, k, v, method, is_causal=True, window=3)


def test_a_repr_shows_every_option():
    assert repr(LocalAttention(5, causal=True)) == "LocalAttention(size=5, causal=True, bucketed=False)"
    assert "causal=False, normalize=None" in repr(LinearAttention(TaylorFeatureMap(), normalize=None))
