"""The estimators against Lemma 2 of the paper: unbiased, with exactly these mean squared errors."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.feature_maps import (
    FavorFeatureMap,
    FeatureMap,
    HyperbolicFavorFeatureMap,
    TrigonometricFavorFeatureMap,
    redraw_features_,
)

D, REPEATS = 8, 4_000
MAPS = [FavorFeatureMap, HyperbolicFavorFeatureMap, TrigonometricFavorFeatureMap]
every_favor = pytest.mark.parametrize("cls", MAPS)


def pairs() -> tuple[Tensor, Tensor]:
    """Three pairs of q and k: alike, at right angles, opposed."""
    q = torch.zeros(3, D, dtype=torch.float64)
    q[:, 0] = 1.2
    k = torch.zeros_like(q)
    k[0, 0], k[1, 1], k[2, 0] = 0.9, 1.5, -0.8
    return q, k


def estimates(cls: Callable[..., FeatureMap], rows: int, *, orthogonal: bool, scaling: int = 0) -> Tensor:
    """(REPEATS, 3): independent estimates of each pair's kernel, from so many rows each."""
    q, k = pairs()
    per_row = 1 if cls is FavorFeatureMap else 2
    # rows of different blocks are independent, so one large map is many small ones
    feature_map = cls(D, REPEATS * rows * per_row, orthogonal=orthogonal, scaling=scaling).double()
    products = (feature_map.query(q).value() * feature_map.key(k).value()).unflatten(-1, (per_row, REPEATS, rows))
    return products.sum((1, 3)).T * REPEATS


def exact() -> Tensor:
    q, k = pairs()
    return ((q * k).sum(-1) / math.sqrt(D)).exp()


def mean_squared_errors(cls: Callable[..., FeatureMap]) -> Tensor:
    """Lemma 2 for one independent row, with x, y = q, k / d^¼, z = x + y and Δ = x − y."""
    q, k = pairs()
    z, delta = ((q + s * k).square().sum(-1) / math.sqrt(D) for s in (1, -1))
    positive = z.exp() * exact().square() * (1 - (-z).exp())
    return {
        FavorFeatureMap: positive,
        HyperbolicFavorFeatureMap: (1 - (-z).exp()) / 2 * positive,
        TrigonometricFavorFeatureMap: z.exp() / exact().square() * (1 - (-delta).exp()).square() / 2,
    }[cls]


@every_favor
@pytest.mark.parametrize("rows", [1, 5])
def test_mean_squared_error_is_that_of_lemma_2(cls, rows):
    errors = (estimates(cls, rows, orthogonal=False) - exact()).square()
    standard_error = errors.std(0) / math.sqrt(REPEATS)
    assert ((errors.mean(0) - mean_squared_errors(cls) / rows).abs() < 5 * standard_error).all()


@every_favor
@pytest.mark.parametrize("orthogonal", [True, False])
def test_unbiased(cls, orthogonal):
    drawn = estimates(cls, D, orthogonal=orthogonal)
    # not the sample's own spread: these tails are long, and it would forgive what it has not seen
    standard_error = (mean_squared_errors(cls) / D / REPEATS).sqrt()
    assert ((drawn.mean(0) - exact()).abs() < 5 * standard_error).all()


@every_favor
def test_orthogonal_rows_do_not_make_it_worse(cls):
    drawn = estimates(cls, D, orthogonal=True)
    errors = (drawn - exact()).square()
    standard_error = errors.std(0) / math.sqrt(REPEATS)
    assert (errors.mean(0) < mean_squared_errors(cls) / D + 3 * standard_error).all()


def test_orthogonal_rows_make_trigonometric_features_better():
    errors = (estimates(TrigonometricFavorFeatureMap, D, orthogonal=True) - exact()).square().mean(0)
    assert (errors < 0.75 * mean_squared_errors(TrigonometricFavorFeatureMap) / D).all()


def test_equal_lengths_have_less_variance_and_a_bias():
    z = (pairs()[0] + pairs()[1]).square().sum(-1) / math.sqrt(D)
    drawn = estimates(FavorFeatureMap, D, orthogonal=True, scaling=1)
    assert drawn.var(0)[0] < mean_squared_errors(FavorFeatureMap)[0] / D
    # E exp(ω·z) over a sphere of radius √d is below exp(‖z‖²/2), its Gaussian counterpart: the series' terms all are
    terms = [z**i / 2**i / math.factorial(i) * math.prod(D / (D + 2 * j) for j in range(i)) for i in range(18)]
    expected = exact() * sum(terms) / (z / 2).exp()
    standard_error = drawn.std(0) / math.sqrt(REPEATS)
    assert ((drawn.mean(0) - expected).abs() < 5 * standard_error).all()
    assert expected[0] < exact()[0]


def test_closed_forms():
    x = torch.randn(2, 65, D, dtype=torch.float64)
    u = x / D**0.25
    half = u.square().sum(-1, keepdim=True) / 2
    positive, hyperbolic, trigonometric = (cls(D, 10).double() for cls in MAPS)
    assert_close(positive.query(x).value(), (u @ positive.projection.rows.mT - half).exp() / math.sqrt(10))
    y = u @ hyperbolic.projection.rows.mT
    assert_close(hyperbolic.key(x).value(), torch.cat([y - half, -y - half], -1).exp() / math.sqrt(10))
    y = u @ trigonometric.projection.rows.mT
    assert_close(trigonometric.key(x).value(), torch.cat([y.cos(), y.sin()], -1) * half.exp() / math.sqrt(5))


@every_favor
def test_number_of_features(cls):
    x = torch.randn(3, 16)
    assert cls(16).query(x).x.shape == (3, 44)
    assert cls(16, 10).query(x).x.shape == (3, 10)
    assert cls(2).query(x[:, :2]).x.shape[-1] == (1 if cls is FavorFeatureMap else 2)
    with pytest.raises(ValueError):
        cls(16, 0)


@pytest.mark.parametrize("cls", MAPS[1:])
def test_pairs_need_an_even_number(cls):
    with pytest.raises(ValueError, match="even, but is 7"):
        cls(16, 7)


@every_favor
def test_redraw(cls):
    feature_map, x = cls(D), torch.randn(5, D)
    before = feature_map.query(x).value()
    assert torch.equal(feature_map.query(x).value(), before)
    redraw_features_(feature_map, torch.Generator().manual_seed(0))
    assert not torch.equal(feature_map.query(x).value(), before)
