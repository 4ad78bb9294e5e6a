import math

import pytest
import torch
from torch.testing import assert_close

from linattn.models import SequenceModel
from linattn.nn import AxialPositions, LearnedPositions, ResidualSequence, SinusoidalPositions


def test_learned_positions_are_rows():
    module = LearnedPositions(9, 4)
    places = torch.tensor([[0, 8, 3], [1, 1, 0]])
    assert torch.equal(module(places), module.weight[places])


def test_axial_positions_are_sums_of_the_axes_rows():
    module = AxialPositions(4, (2, 3, 5))
    assert module.max_length == 30
    a, b, c = module.weights
    for place in range(30):
        expected = a[place // 15] + b[place // 5 % 3] + c[place % 5]
        assert_close(module(torch.tensor([place]))[0], expected)


@pytest.mark.parametrize("dim", [1, 8, 9])
def test_sinusoidal_positions_agree_with_the_formula(dim):
    table = SinusoidalPositions(dim)(torch.arange(200))
    assert table.shape == (200, dim)
    half = -(-dim // 2)
    for place, channel in ((0, 0), (7, 0), (199, half - 1)):
        angle = place * 10000 ** (-2 * channel / dim)
        assert math.isclose(table[place, channel], math.sin(angle), abs_tol=1e-6)
        if half + channel < dim:
            assert math.isclose(table[place, half + channel], math.cos(angle), abs_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_position_has_the_models_dtype(dtype):
    """And its precision: the formula in float64, rounded once."""
    places = torch.arange(50) * 997
    angles = places.double().unsqueeze(-1) * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    expected = torch.cat([angles.sin(), angles.cos()], -1).to(dtype)
    table = SinusoidalPositions(8).to(dtype)(places)
    assert table.dtype == dtype and not SinusoidalPositions(8).state_dict()
    assert_close(table, expected, rtol=0, atol=1e-10 if dtype == torch.float64 else torch.finfo(dtype).eps)
    for module in (LearnedPositions(60000, 4), AxialPositions(4, (300, 200))):
        assert module.to(dtype)(places).dtype == dtype
    embedding, positions = torch.nn.Embedding(3, 8), SinusoidalPositions(8)
    torch.nn.init.zeros_(embedding.weight)
    model = SequenceModel(embedding, ResidualSequence([]), positions=positions).to(dtype)
    assert_close(model(torch.zeros(1, 50, dtype=torch.long))[0], positions(torch.arange(50)), rtol=0, atol=0)


def test_sinusoidal_positions_are_exact_far_away():
    table = SinusoidalPositions(2)(torch.tensor([10**7 + 1]))
    assert math.isclose(table[0, 0], math.sin(10**7 + 1), abs_tol=1e-6)


@pytest.mark.parametrize(
    "module",
    [LearnedPositions(6, 4), AxialPositions(4, (2, 3)), AxialPositions(4, (2, 5), max_length=6)],
    ids=["learned", "axial", "axial, shorter"],
)
def test_positions_end_somewhere(module):
    module(torch.tensor([5]))
    with pytest.raises(ValueError, match=r"positions must be in \[0, 6\)"):
        module(torch.tensor([6]))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "module",
    [LearnedPositions(6, 4), AxialPositions(4, (2, 3)), SinusoidalPositions(4)],
    ids=["learned", "axial", "sinusoidal"],
)
def test_positions_are_whole_numbers(module):
    positions = torch.arange(6)
    assert_close(module(positions.int()), module(positions))
    for dtype in (torch.float32, torch.bool, torch.uint8):
        with pytest.raises(ValueError, match=f"positions must be torch.int64 or torch.int32, but are {dtype}"):
            module(positions.to(dtype))
    with pytest.raises(ValueError, match="positions must be a tensor, but is a list"):
        module(positions.tolist())


def test_there_must_be_positions():
    with pytest.raises(ValueError, match=r"the grid \(2, 3\) has 6 positions, but max_length is 7"):
        AxialPositions(4, (2, 3), max_length=7)
    for make in (lambda: LearnedPositions(0, 4), lambda: AxialPositions(4, ()), lambda: AxialPositions(4, (3, 0))):
        with pytest.raises(ValueError, match="must be a whole number of at least 1, but is"):
            make()


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_learned_and_axial_positions_begin_as_large(std):
    places = torch.arange(30 * 40)
    for module in (LearnedPositions(1200, 64, std=std), AxialPositions(64, (30, 40), std=std)):
        assert module(places).std().item() == pytest.approx(std, rel=0.1)
