import pytest
import torch
from torch.testing import assert_close

from linattn.ops.tokens.rotary import rotate


@pytest.mark.parametrize("d", [1, 2, 6, 7])
def test_agrees_with_the_definition(d):
    x, positions = torch.randn(2, 9, d, dtype=torch.float64), torch.arange(3, 12)
    y, half = x.clone(), d // 2
    for n in range(9):
        for c in range(half):
            angle = positions[n] * 100.0 ** (-c / half)
            pair = torch.complex(x[:, n, c], x[:, n, c + half]) * torch.exp(1j * angle)
            y[:, n, c], y[:, n, c + half] = pair.real, pair.imag
    assert_close(rotate(x, positions, base=100.0), y, rtol=1e-6, atol=1e-6)


def test_products_know_only_the_distance():
    q, k = torch.randn(2, 5, 64, dtype=torch.float64)
    i, j = torch.randint(1000, (2, 5))
    near = (rotate(q, i) * rotate(k, j)).sum(-1)
    assert_close((rotate(q, i + 777_777) * rotate(k, j + 777_777)).sum(-1), near, rtol=0, atol=1e-8)


def test_the_millionth_float32_token_is_as_exact_as_the_first():
    x, positions = torch.randn(4, 64), torch.arange(4) + 1_000_000
    assert_close(rotate(x, positions).double(), rotate(x.double(), positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    x, positions = torch.randn(2, 3, 50, 8).to(dtype), torch.arange(50)
    assert torch.equal(rotate(x, positions), rotate(x.float(), positions).to(dtype))


def test_positions_of_each_row():
    x, positions = torch.randn(2, 3, 5, 4), torch.randint(50, (2, 1, 5))
    y = rotate(x, positions)
    assert_close(y[1, 2], rotate(x[1, 2], positions[1, 0]))


def test_gradients():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, torch.arange(3)), x)
