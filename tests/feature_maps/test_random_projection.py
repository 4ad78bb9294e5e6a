import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.feature_maps import FavorFeatureMap, RandomProjection, redraw_features_
from linattn.feature_maps.random_projection import default_num_features, orthonormal_rows


@pytest.mark.parametrize(("d", "rows"), [(16, 44), (16, 16), (16, 5), (3, 8), (1, 4)])
@pytest.mark.parametrize("scaling", [0, 1])
def test_orthogonal_rows(d, rows, scaling):
    projection = RandomProjection(d, rows, scaling=scaling)
    for block in projection.rows.split(d):
        gram = block @ block.mT
        assert_close(gram - gram.diagonal().diag_embed(), torch.zeros_like(gram), rtol=0, atol=1e-5)
    if scaling == 1:
        assert_close(projection.rows.norm(dim=-1), torch.full((rows,), math.sqrt(d)))


@pytest.mark.parametrize("orthogonal", [True, False])
def test_rows_are_as_long_as_gaussian_vectors(orthogonal):
    d, rows = 5, 20_000
    square = RandomProjection(d, rows, orthogonal=orthogonal).rows.double().square().sum(-1)
    # a chi-squared variable of d degrees of freedom has mean d and variance 2d
    assert abs(square.mean() - d) < 5 * math.sqrt(2 * d / rows)
    assert abs(square.var() / (2 * d) - 1) < 0.1


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("scaling", [0, 1])
def test_every_direction_is_as_likely(orthogonal, scaling):
    d, rows = 3, 30_000
    direction = RandomProjection(d, rows, orthogonal=orthogonal, scaling=scaling).rows.double()
    direction = direction / direction.norm(dim=-1, keepdim=True)
    assert direction.mean(0).abs().max() < 5 / math.sqrt(d * rows)
    assert_close(direction.mT @ direction / rows, torch.eye(3, dtype=torch.float64) / d, rtol=0, atol=0.01)
    # uniform on the sphere in three dimensions: each coordinate is uniform on [−1, 1], so E|c| = ½ and E c⁴ = 1/5
    assert_close(direction.abs().mean(0), torch.full((3,), 0.5, dtype=torch.float64), rtol=0, atol=0.01)
    assert_close(direction.pow(4).mean(0), torch.full((3,), 0.2, dtype=torch.float64), rtol=0, atol=0.01)


def test_the_first_row_of_a_rotation_has_either_sign():
    # without the correction of signs, QR's first diagonal entry always has the sign that the algorithm likes
    first = orthonormal_rows(4_000, 2).unflatten(0, (-1, 2))[:, 0]
    angle = torch.atan2(first[:, 1], first[:, 0])
    counts = torch.histc(angle, bins=4, min=-math.pi, max=math.pi)
    assert (counts - 500).abs().max() < 5 * math.sqrt(500)
    q = orthonormal_rows(4_000, 2).unflatten(0, (-1, 2))
    assert abs(torch.linalg.det(q).mean()) < 5 / math.sqrt(2_000)


def test_projection():
    projection, x = RandomProjection(16, 5).double(), torch.randn(3, 63, 16, dtype=torch.float64)
    assert_close(projection(x), x / 2 @ projection.rows.mT)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("scaling", [0, 1])
def test_redraw_in_place_and_by_seed(orthogonal, scaling):
    one, two = (RandomProjection(8, 20, orthogonal=orthogonal, scaling=scaling) for _ in range(2))
    rows, before = one.rows, one.rows.clone()
    assert not torch.equal(one.rows, two.rows)
    for projection in (one, two):
        projection.redraw_(torch.Generator().manual_seed(3))
    assert one.rows is rows and not torch.equal(rows, before)
    assert torch.equal(one.rows, two.rows)
    torch.manual_seed(3)
    one.redraw_()
    assert torch.equal(one.rows, two.rows)


def test_redraw_keeps_dtype_and_gradients_away():
    projection = RandomProjection(8, 20).bfloat16()
    projection.redraw_()
    assert projection.rows.dtype == torch.bfloat16 and not projection.rows.requires_grad
    assert not list(projection.parameters())


def test_redraw_all_of_a_model():
    shared = FavorFeatureMap(4)
    models = [nn.Sequential(FavorFeatureMap(4), shared, shared, nn.Linear(4, 4)) for _ in range(2)]
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    drawn = []
    for model in models:
        redraw_features_(model, torch.Generator().manual_seed(1))
        drawn.append({k: v.clone() for k, v in model.state_dict().items()})
    for key in drawn[0]:
        assert torch.equal(drawn[0][key], drawn[1][key]) or key.startswith("3.")
        assert torch.equal(drawn[0][key], before[0][key]) == key.startswith("3.")
    assert not torch.equal(drawn[0]["0.projection.rows"], drawn[0]["1.projection.rows"])


def test_default_number_of_features():
    assert [default_num_features(d) for d in (1, 2, 16, 64)] == [1, 1, 44, 266]


@pytest.mark.parametrize(("arguments", "message"), [((4, 0), "num_rows.* but is 0"), ((0, 4), "head_dim.* but is 0")])
def test_sizes_must_be_positive(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomProjection(*arguments)


def test_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match=r"0 .* or 1 .*but is 2"):
        RandomProjection(4, 4, scaling=2)


def test_another_number_of_channels_is_refused():
    with pytest.raises(ValueError, match=r"\(\.\.\., 4\).* is \(3, 5\)"):
        RandomProjection(4, 4)(torch.randn(3, 5))
