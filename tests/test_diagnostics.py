import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from linattn import diagnostics
from linattn.attention.linear import LinearAttention
from linattn.diagnostics import SoftmaxComparison, compare_with_softmax
from linattn.feature_maps import FEATURE_MAPS, EfficientFeatureMap, ElementwiseFeatureMap, FavorFeatureMap

every_map = pytest.mark.parametrize("name", FEATURE_MAPS)
either = pytest.mark.parametrize("causal", [False, True])


def tokens(h: int = 4, hk: int = 2, n: int = 65, d: int = 8, std: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(2, h, n, d), torch.randn(2, hk, n, d), torch.randn(2, hk, n, 5)
    return q.double() * std, k.double() * std, v.double()


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def holes(n: int, causal: bool) -> tuple[Tensor, Tensor]:
    """A key mask (2, 1, n) with padding on the left, on the right and inside, and which key each query sees."""
    present = torch.ones(2, 1, n, dtype=torch.bool)
    present[0, :, :7], present[1, :, -9:], present[:, :, 20:24] = False, False, False
    visible = present.unsqueeze(-2).expand(2, 1, n, n)
    return present, (visible.tril() if causal else visible)


@every_map
@either
def test_the_output_error_is_that_of_the_attention(name, causal):
    q, k, v = tokens()
    feature_map = FEATURE_MAPS[name](8, 4, 2).double()
    present, visible = holes(65, causal)
    report = compare_with_softmax(q, k, feature_map, v=v, causal=causal, key_mask=present)
    y = LinearAttention(feature_map, causal=causal)(q, k, v, key_mask=present)
    target = softmax_attention(q, k, v, visible)
    uniform = softmax_attention(torch.zeros_like(q), k, v, visible)
    counted = present.unsqueeze(-1) if causal else torch.ones(1, dtype=torch.bool)
    size = (target * counted).square().sum((0, 2, 3))
    for error, other in ((report.output_error, y), (report.uniform_output_error, uniform)):
        expected = (((other - target) * counted).square().sum((0, 2, 3)) / size).sqrt()
        assert_close(error, expected, rtol=1e-6, atol=1e-8)


@either
@pytest.mark.parametrize("rubbish", [3.0, math.nan])
def test_what_stands_in_the_place_of_a_missing_token_has_no_effect(causal, rubbish):
    """Missing queries only count where they are missing tokens themselves."""
    (q, k, v), (present, _) = tokens(), holes(65, causal)
    absent, options = ~present.unsqueeze(-1), {"causal": causal, "key_mask": present}
    changed = [x.masked_fill(absent, rubbish) for x in ((q, k, v) if causal else (k, v))]
    feature_map = ElementwiseFeatureMap("elu_plus_one")
    expected = compare_with_softmax(q, k, feature_map, v=v, **options)
    q, k, v = changed if causal else (q, *changed)
    found = compare_with_softmax(q, k, feature_map, v=v, **options)
    for figure in dataclasses.fields(found)[1:]:
        assert_close(getattr(found, figure.name), getattr(expected, figure.name))


@either
def test_figures_are_their_definitions(causal):
    q, k, _ = tokens(2, 2)
    report = compare_with_softmax(q, k, ElementwiseFeatureMap("softplus"), causal=causal)
    visible = torch.ones(65, 65, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    p = (q @ k.mT / math.sqrt(8)).masked_fill(~visible, -torch.inf).softmax(-1)
    a = (F.softplus(q) @ F.softplus(k).mT) * visible
    a = a / a.sum(-1, keepdim=True)
    u = (visible.double() / visible.sum(-1, keepdim=True)).expand_as(p)
    heads = (0, 2)

    def entropy(w: Tensor) -> Tensor:
        return -torch.xlogy(w, w).sum(-1).mean(heads)

    def divergence(w: Tensor) -> Tensor:
        return (torch.xlogy(p, p) - torch.xlogy(p, w)).sum(-1).mean(heads)

    def spread(w: Tensor) -> Tensor:
        return w.square().sum((0, 2, 3)).sqrt()

    assert_close(report.output_error, spread(a - p) / spread(p))
    assert_close(report.uniform_output_error, spread(u - p) / spread(p))
    assert_close(report.total_variation, (a - p).abs().sum(-1).mean(heads) / 2)
    assert_close(report.uniform_total_variation, (u - p).abs().sum(-1).mean(heads) / 2)
    assert_close(report.divergence, divergence(a))
    assert_close(report.uniform_divergence, divergence(u))
    assert_close(report.entropy, entropy(a))
    assert_close(report.softmax_entropy, entropy(p))
    assert_close(report.negative_weight, torch.zeros(2, dtype=torch.float64))
    norms = [x.square().sum(-1).mean(heads).sqrt() for x in (q, k)]
    assert_close(report.norm_product, norms[0] * norms[1] / math.sqrt(8))


def test_without_values_errors_are_those_of_independent_values():
    q, k, _ = tokens(n=40)
    v = torch.randn(2, 2, 40, 4_000, dtype=torch.float64)
    feature_map = FEATURE_MAPS["taylor2"](8, 4, 2)
    with_values, without = (compare_with_softmax(q, k, feature_map, v=x) for x in (v, None))
    assert_close(without.output_error, with_values.output_error, rtol=0.03, atol=0)


def test_uniform_weights_are_seen_as_such():
    q, k, v = tokens()
    # one feature that is the same everywhere
    report = compare_with_softmax(q, k, ElementwiseFeatureMap("sigmoid"), v=v)
    flat = compare_with_softmax(q, torch.zeros_like(k), ElementwiseFeatureMap("sigmoid"), v=v)
    assert (flat.output_error < 1e-12).all() and (flat.divergence.abs() < 1e-12).all()
    assert_close(flat.entropy, torch.full((4,), math.log(65), dtype=torch.float64))
    assert (report.uniform_divergence > 0.1).all()


def test_negative_weights_and_missing_ones_are_told():
    q, k, _ = tokens()
    signed = compare_with_softmax(q, k, ElementwiseFeatureMap("identity"))
    assert (signed.negative_weight > 0.1).all() and signed.divergence.isinf().all()


def test_small_features():
    k = torch.tensor([[1.0, 2e-4], [5e-5, 1.0], [5e-5, 5e-5]])[None, None].expand(2, 1, -1, -1)
    report = compare_with_softmax(k, k, ElementwiseFeatureMap("identity"))
    assert_close(report.small_features.item(), 0.5)
    # the last token missing
    present = torch.tensor([True, True, False]).view(1, 1, 3)
    report = compare_with_softmax(k, k, ElementwiseFeatureMap("identity"), key_mask=present)
    assert_close(report.small_features.item(), 0.25)


@pytest.mark.parametrize("name", ["efficient", "favor", "elu"])
@either
def test_chunks_do_not_matter(name, causal, monkeypatch):
    q, k, v = tokens()
    feature_map = FEATURE_MAPS[name](8, 4, 2).double()
    whole = compare_with_softmax(q, k, feature_map, v=v, causal=causal)
    monkeypatch.setattr(diagnostics, "_WEIGHTS_AT_A_TIME", 2 * 4 * 65 * 7)
    cut = compare_with_softmax(q, k, feature_map, v=v, causal=causal)
    for name in ("output_error", "divergence", "entropy", "total_variation"):
        assert_close(getattr(cut, name), getattr(whole, name))


def test_favor_at_unit_variance_is_no_better_than_uniform_attention():
    q, k, v = (torch.randn(1, 4, 512, 64) for _ in range(3))
    report = compare_with_softmax(q, k, FavorFeatureMap(64), v=v)
    assert (report.output_error > report.uniform_output_error).all()
    assert (report.small_features > 0.7).all()
    assert "no better than uniform attention" in report.verdict
    # with exponents a sixteenth as large, and many features, it is an approximation
    short = compare_with_softmax(q / 4, k / 4, FavorFeatureMap(64, 8_192), v=v)
    assert "is close to softmax" in short.verdict


def test_more_features_come_nearer_to_softmax():
    q, k, v = tokens(n=200, std=0.5)
    errors = [compare_with_softmax(q, k, FavorFeatureMap(8, m), v=v).output_error.mean() for m in (16, 256, 4_096)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_map
def test_dtypes_and_ranges(name, dtype):
    q, k, v = (x.to(dtype) for x in tokens(std=30))
    report = compare_with_softmax(q, k, FEATURE_MAPS[name](8, 4, 2).to(dtype), v=v, causal=True)
    assert report.uniform_output_error.isfinite().all() and report.softmax_entropy.isfinite().all()
    assert name == "favor_trigonometric" or report.output_error.isfinite().all()


@every_map
def test_autocast_changes_nothing(name):
    q, k, v = (x.float() for x in tokens())
    feature_map = FEATURE_MAPS[name](8, 4, 2)
    expected = compare_with_softmax(q, k, feature_map, v=v)
    with torch.autocast("cpu", torch.bfloat16):
        found = compare_with_softmax(q, k, feature_map, v=v)
    for each in dataclasses.fields(SoftmaxComparison)[1:]:
        assert_close(getattr(found, each.name), getattr(expected, each.name), rtol=0, atol=0)


def test_more_keys_than_queries_and_one_of_each():
    feature_map = EfficientFeatureMap()
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 9, 8), torch.randn(2, 1, 9, 4)
    assert compare_with_softmax(q, k, feature_map, v=v).output_error.shape == (3,)
    alone = compare_with_softmax(q[:, :, :1], k[:, :, :1], feature_map)
    assert_close(alone.output_error, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_table_is_legible():
    q, k, v = tokens()
    report = compare_with_softmax(q, k, ElementwiseFeatureMap("elu_plus_one"), v=v)
    assert isinstance(report, SoftmaxComparison)
    head, *rows, verdict = str(report).splitlines()
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "mean"]
    assert {len(row) for row in rows} == {len(head)}
    assert rows[1].split()[1] == f"{report.output_error[1]:.3g}"
    assert verdict == report.verdict
    assert f"uniform attention would give {report.uniform_output_error.mean():.2g}" in verdict


@pytest.mark.parametrize(
    ("q", "k", "v", "causal", "message"),
    [
        ((2, 5, 8), (2, 5, 8), None, False, r"\(b, h, n, d\)"),
        ((1, 2, 5, 8), (1, 2, 5, 7), None, False, r"\(1, 2, 5, 8\).*\(1, 2, 5, 7\)"),
        ((1, 2, 0, 8), (1, 2, 5, 8), None, False, "empty"),
        ((1, 3, 5, 8), (1, 2, 5, 8), None, False, "divide"),
        ((1, 2, 5, 8), (1, 2, 6, 8), None, True, "a query for every key"),
        ((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 6, 8), False, "every key must have a value"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_shapes_are_checked(q, k, v, causal, message, monkeypatch):
    v = None if v is None else torch.randn(v)
    unchecked = getattr(compare_with_softmax, "__wrapped__", compare_with_softmax)
    with pytest.raises((ValueError, TypeError), match=message if unchecked is compare_with_softmax else ""):
        compare_with_softmax(torch.randn(q), torch.randn(k), ElementwiseFeatureMap("relu"), v=v, causal=causal)


@either
def test_a_head_without_keys_is_named(causal):
    q, k, _ = tokens()
    present = torch.ones(2, 2, 65, dtype=torch.bool)
    present[:, 1] = False
    with pytest.raises(ValueError, match="no query of head 2 sees a key"):
        compare_with_softmax(q, k, EfficientFeatureMap(), causal=causal, key_mask=present)
