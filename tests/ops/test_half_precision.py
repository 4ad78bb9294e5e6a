"""Gradients in half precision, at lengths and with values where a difference of rounded numbers would lose them."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from linattn.ops import LinearState, causal_linear_attention, linear_attention, read, summarize
from tests.ops.test_causal_linear import run
from tests.recurrence import log_decays, recurrence, relative, rounded

# relative errors of norms; a tolerance for all lengths
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}
NAMES = ("q", "k", "v", "S", "z", "log_decay")

every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
every_normalization = pytest.mark.parametrize("normalize", ["output", "keys", None])


@cache
def causal_case(
    n: int, mean: float, normalize: str | None, decayed: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, the upstream gradients of y, S and z, and the gradients of the inputs, all in float64."""
    torch.manual_seed(n)
    log_decay = log_decays(n) if decayed else None
    heads = 2 if log_decay is None else len(log_decay)
    inputs = [rounded(heads, n, 8), rounded(heads, n, 8), rounded(heads, n, 8, mean=mean)]
    inputs += [rounded(heads, 8, 8, mean=mean), rounded(heads, 8).abs() + 1]
    inputs += [] if log_decay is None else [log_decay]
    leaves = [x.requires_grad_() for x in inputs]
    results = recurrence(*leaves[:5], None if log_decay is None else leaves[5], normalize)
    # without a denominator gradients grow with n, and float16 ends at 65,504
    small = 1.0 if normalize else 2.0**-10
    upstream = [small * rounded(heads, n, 8), small * rounded(heads, 8, 8), small * rounded(heads, 8)]
    return inputs, upstream, list(torch.autograd.grad(results, leaves, upstream))


def causal_gradients(
    backend: str, dtype: torch.dtype, n: int, mean: float, normalize: str | None, decayed: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inputs, upstream, exact = causal_case(n, mean, normalize, decayed)
    dtypes = [dtype] * 3 + [torch.float32] * 2 + [dtype]
    leaves = [x.detach().to(d).requires_grad_() for x, d in zip(inputs, dtypes, strict=False)]
    options: dict[str, Any] = {"log_decay": leaves[5]} if decayed else {}
    options |= {"normalize": normalize, "feature_map": "elu_plus_one"}
    y, state = run(*leaves[:3], LinearState(*leaves[3:5]), backend=backend, **options)
    results = (y, state.S, state.z)
    ours = torch.autograd.grad(results, leaves, [x.to(y.dtype) for x, y in zip(upstream, results, strict=True)])
    return dict(zip(NAMES, ours, strict=False)), dict(zip(NAMES, exact, strict=False))


@every_half
@every_normalization
@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
@pytest.mark.parametrize(
    ("backend", "n"),
    [*(("chunked", n) for n in (256, 2048, 16384)), ("reference", 256), ("reference", 2048), ("recurrent", 256)],
)
def test_causal_gradients_are_those_of_float64(
    backend: str, n: int, mean: float, normalize: str | None, dtype: torch.dtype
) -> None:
    ours, exact = causal_gradients(backend, dtype, n, mean, normalize)
    errors = {name: relative(ours[name], exact[name]) for name in exact}
    assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_normalization
@pytest.mark.parametrize(
    ("backend", "n"), [("chunked", 200), ("chunked", 16384), ("reference", 200), ("recurrent", 200)]
)
def test_gradients_of_decays_are_those_of_float64(
    backend: str, n: int, normalize: str | None, dtype: torch.dtype
) -> None:
    """Of decays head by head: a strong decay's gradient is small beside what its keys and queries have in common."""
    ours, exact = causal_gradients(backend, dtype, n, 1.0, normalize, decayed=True)
    errors = {name: relative(ours[name], exact[name]) for name in exact}
    assert max(errors.values()) <= BOUNDS[dtype], errors
    heads = list(zip(ours["log_decay"].double(), exact["log_decay"], strict=True))
    assert max(relative(a, b) for a, b in heads) <= (2e-2 if dtype == torch.bfloat16 else 1e-3)
    assert max(abs(a.sum() / b.sum() - 1).item() for a, b in heads) <= 0.1


@every_half
@every_normalization
@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("n", [256, 2048, 16384])
def test_gradients_of_attention_to_all_keys_are_those_of_float64(
    n: int, backend: str, mean: float, normalize: str | None, dtype: torch.dtype
) -> None:
    if backend == "reference":
        n = min(n, 2048)
    exact = [rounded(2, n, 8), rounded(2, n, 8), rounded(2, n, 8, mean=mean)]
    leaves = [x.to(dtype).requires_grad_() for x in exact]
    exact, upstream = [x.requires_grad_() for x in exact], (1.0 if normalize else 2.0**-10) * rounded(2, n, 8)
    q, k = (torch.nn.functional.elu(x) + 1 for x in exact[:2])
    S, z = k.mT @ exact[2], k.sum(-2, keepdim=True)
    y = (q / z if normalize == "keys" else q) @ S
    y = y / (q * z).sum(-1, keepdim=True) if normalize == "output" else y
    expected = torch.autograd.grad(y, exact, upstream)
    y = linear_attention(*leaves, normalize=normalize, feature_map="elu_plus_one", backend=backend)
    ours = torch.autograd.grad(y, leaves, upstream.to(dtype))
    errors = [relative(a, b) for a, b in zip(ours, expected, strict=True)]
    assert max(errors) <= BOUNDS[dtype], errors


def test_outputs_may_be_overwritten_before_the_backward() -> None:
    """No output is saved for it."""
    leaves = [torch.randn(2, 100, 4, requires_grad=True) for _ in range(3)]
    calls = [
        lambda: causal_linear_attention(*leaves, feature_map="elu_plus_one")[0],
        lambda: linear_attention(*leaves, feature_map="elu_plus_one"),
        lambda: read(leaves[0], summarize(*leaves[1:], feature_map="elu_plus_one"), feature_map="elu_plus_one"),
    ]
    for call in calls:
        expected = torch.autograd.grad(call().sum(), leaves)
        ours = torch.autograd.grad(call().mul_(1).add_(3).sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
