"""Gradients in half precision, at lengths and with values where a difference of rounded numbers would lose them."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from linattn.ops import (
    LinearState,
    causal_delta_attention,
    causal_linear_attention,
    linear_attention,
    read,
    summarize,
)
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
    [("chunked", 256), ("chunked", 16384), ("reference", 256), ("recurrent", 64)],
)
def test_causal_gradients_are_those_of_float64(
    backend: str, n: int, mean: float, normalize: str | None, dtype: torch.dtype
) -> None:
    ours, exact = causal_gradients(backend, dtype, n, mean, normalize)
    errors = {name: relative(ours[name], exact[name]) for name in exact}
    assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_normalization
@pytest.mark.parametrize(("backend", "n"), [("chunked", 200), ("chunked", 4096), ("reference", 200), ("recurrent", 64)])
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
@pytest.mark.parametrize(("backend", "n"), [("chunked", 256), ("chunked", 16384), ("reference", 2048)])
def test_gradients_of_attention_to_all_keys_are_those_of_float64(
    backend: str, n: int, mean: float, normalize: str | None, dtype: torch.dtype
) -> None:
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


def unnormalized(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, log_decay=log_decay, normalize=None)[0]


def normalized(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, log_decay=log_decay, feature_map="elu_plus_one")[0]


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return causal_delta_attention(q, k, v, beta, log_decay=log_decay)[0]


def every_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, feature_map="elu_plus_one")


# q is not among them: autograd itself expands it, and rounds the gradient of each copy; scales are float32
def broadcast_arguments() -> Iterator[Any]:
    """Yield (operator, the shapes of all its arguments, the name of the broadcast one)."""
    b, h, n, d = 2, 3, 130, 4
    for operator in (unnormalized, normalized, delta, every_key):
        full = {name: (b, h, n, d) for name in inspect.signature(operator).parameters}
        full |= {"beta": (b, h, n)} if "beta" in full else {}
        for name in [name for name in full if name != "q"]:
            shapes = [(1, h, n, d), (b, 1, n, d), (1, 1, n, d)] if len(full[name]) == 4 else []
            if name in ("beta", "log_decay"):
                shapes += [(1, h, n), (b, 1, n), (n,), (b, h, 1), (1, h, 1), (1,)]
            for shape in shapes:
                yield pytest.param(operator, full, name, shape, id=f"{operator.__name__}-{name}-{shape}")


@pytest.mark.parametrize(("operator", "shapes", "name", "shape"), list(broadcast_arguments()))
def test_the_gradient_of_a_broadcast_argument_is_the_exact_one_rounded(
    operator: Callable[..., Tensor], shapes: dict[str, tuple[int, ...]], name: str, shape: tuple[int, ...]
) -> None:
    inputs = {key: torch.randn(shape if key == name else own).bfloat16() for key, own in shapes.items()}
    # keys so short that states do not grow
    made = {"k": lambda x: x / 4, "log_decay": lambda x: -0.1 * x.abs(), "beta": torch.sigmoid}
    inputs |= {key: make(inputs[key]) for key, make in made.items() if key in inputs}
    upstream = torch.randn(2, 3, 130, 4).bfloat16()

    def gradient(dtype: torch.dtype) -> Tensor:
        leaves = {key: x.to(dtype).requires_grad_() for key, x in inputs.items()}
        return torch.autograd.grad(operator(**leaves), leaves[name], upstream.to(dtype))[0]

    exact = gradient(torch.float64)
    assert relative(gradient(torch.bfloat16), exact) < 1.05 * relative(exact.bfloat16(), exact) + 1e-4
