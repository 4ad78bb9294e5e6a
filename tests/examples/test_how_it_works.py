"""The forms of the page *How it works* are those of the operators: outputs, states and gradients, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from examples.how_it_works import forms
from linattn import LinearState, causal_delta_attention, causal_linear_attention

PAGE = Path(__file__).parents[2] / "docs" / "how_it_works.md"
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
# the form of one token or chunk, and the lengths of its pieces
LINEAR = [(forms.token, 1), (forms.chunk, 1), (forms.chunk, 7), (forms.chunk, 64)]
DELTA = [(forms.delta_token, 1), (forms.delta_chunk, 1), (forms.delta_chunk, 7), (forms.delta_chunk, 64)]


def tokens(n: int = 65) -> tuple[Tensor, ...]:
    """Return q, k, v and g of positive features, and β."""
    q, k, v = (torch.rand(2, 3, n, d, dtype=torch.float64).requires_grad_() for d in (5, 5, 4))
    g, beta = (torch.rand(2, 3, n, 1, dtype=torch.float64) for _ in range(2))
    return q, k, v, (-g).requires_grad_(), (2 * beta).requires_grad_()


def compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
    """Compare outputs, states, and the gradients of all inputs for upstream gradients of random numbers."""
    upstream = tuple(torch.randn_like(x) for x in expected)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, **EXACT)
    ours, theirs = (torch.autograd.grad(outputs, inputs, upstream) for outputs in (found, expected))
    for x, y in zip(ours, theirs, strict=True):
        assert_close(x, y, **EXACT)


@pytest.mark.parametrize(("step", "length"), LINEAR)
def test_linear_forms(step: forms.Step, length: int) -> None:
    *inputs, _ = tokens()
    S = torch.randn(2, 3, 5, 4, dtype=torch.float64).requires_grad_()
    state = LinearState(S, torch.zeros(2, 3, 5, dtype=torch.float64))
    q, k, v, g = inputs
    y, (S_end, _) = causal_linear_attention(q, k, v, state, log_decay=g.squeeze(-1), normalize=None)
    compare(forms.walk(step, length, S, *inputs), (y, S_end), (*inputs, S))


def test_the_definition() -> None:
    q, k, v, g, _ = tokens()
    expected = causal_linear_attention(q, k, v, log_decay=g.squeeze(-1), normalize=None)[0]
    compare((forms.definition(q, k, v, g),), (expected,), (q, k, v, g))


@pytest.mark.parametrize(("step", "length"), LINEAR)
def test_denominators(step: forms.Step, length: int) -> None:
    q, k, v, g, _ = tokens()
    expected = causal_linear_attention(q, k, v, log_decay=g.squeeze(-1))[0]
    compare((forms.normalized(step, length, q, k, v, g),), (expected,), (q, k, v, g))


@pytest.mark.parametrize(("step", "length"), DELTA)
def test_delta_forms(step: forms.Step, length: int) -> None:
    q, k, v, g, beta = tokens()
    k = normalize(k.detach(), dim=-1).requires_grad_()
    S = torch.randn(2, 3, 5, 4, dtype=torch.float64).requires_grad_()
    expected = causal_delta_attention(q, k, v, beta.squeeze(-1), S, log_decay=g.squeeze(-1))
    inputs = (q, k, v, g, beta, S)
    compare(forms.walk(step, length, S, q, k, v, g, beta), expected, inputs)


def test_the_page_shows_at_most_80_lines() -> None:
    """Every part of the file is on the page, and all of them together are short."""
    source, page = Path(forms.__file__).read_text("utf-8"), PAGE.read_text("utf-8")
    parts = [line.strip("# []") for line in source.splitlines() if line.startswith("# [")][:-1]
    assert all(f":start-after: '# [{part}]'" in page for part in parts)
    shown = source.split("# [definition]")[1].splitlines()
    assert len([line for line in shown if line.strip() and not line.startswith("# [")]) <= 80
