"""The laws of the kernels' gradients in half precision, of decays, and at masked tokens, against float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, linear_attention
from linattn.ops.triton import tiling

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}
NAMES = ("dq", "dk", "dv", "dS", "dz", "dlog_decay")
# bfloat16 rounds most, so it meets every mean of the values; float16 meets the largest, where most cancels
every_rounding = pytest.mark.parametrize(
    ("dtype", "mean"), [*((torch.bfloat16, mean) for mean in (0, 1, 10)), (torch.float16, 10)]
)


def tokens(n: int, mean: float, dtype: torch.dtype, device: torch.device, d: int = 16, rows: int = 1) -> list[Tensor]:
    """Queries, keys, values, and the state of 40 tokens of the same kind before them."""
    q, k, v = (
        x.to(device, dtype) for x in torch.randn(3, rows, n + 40, d) + torch.tensor([0, 0, mean])[:, None, None, None]
    )
    before = (x[:, :40].double() for x in (q, k, v))
    _, state = causal_linear_attention(*before, feature_map="elu_plus_one", backend="reference")
    return [*(x[:, 40:] for x in (q, k, v)), state.S.float(), state.z.float()]


def length(device: torch.device) -> int:
    """Return a number of tokens of many chunks; the interpreter, which is slow, gets three of 16, one not full."""
    return 256 if device.type == "cuda" else 40


def gradients(leaves: list[Tensor], upstream: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    q, k, v, S, z, *log_decay = leaves
    y, state = causal_linear_attention(
        q, k, v, LinearState(S, z), log_decay=log_decay[0] if log_decay else None, feature_map="elu_plus_one", **options
    )
    upstream = [x.to(y.dtype) for x, y in zip(upstream, (y, state.S, state.z), strict=True)]
    return torch.autograd.grad((y, state.S, state.z), leaves, upstream)


def upstream_of(leaves: list[Tensor], state: float) -> list[Tensor]:
    """Gradients of y, and of S and z with this deviation."""
    return [torch.randn_like(x) * scale for x, scale in zip(leaves[2:5], (1, state, state), strict=True)]


def check(leaves: list[Tensor], bound: float, **options: Any) -> tuple[Tensor, ...]:
    """All gradients, row by row of the decay; the error's norm over the norm. Returns the last ones."""
    # the last state's would hide errors in what comes from y
    upstream = upstream_of(leaves, state=0)
    ours = gradients(leaves, upstream, backend="triton", **options)
    exact = gradients([x.double() for x in leaves], upstream, backend="reference", **options)
    for name, a, b in zip(NAMES, ours, exact, strict=False):
        by_row = (-1,) if name == "dlog_decay" else None
        error, norm = (torch.linalg.vector_norm(x.double(), dim=by_row) for x in (a.double() - b, b))
        # what has decayed to less than float32 holds is zero
        assert (error <= bound * norm + 1e-30).all(), f"{name}: {error / norm}"
    return ours[-1], exact[-1]


@every_rounding
@pytest.mark.parametrize("normalize", ["output", None])
def test_half_precision(dtype: torch.dtype, mean: float, normalize: str | None, device: torch.device) -> None:
    check(tokens(length(device), mean, dtype, device), BOUNDS[dtype], normalize=normalize)


@pytest.mark.parametrize(
    ("dtype", "mean", "normalize"),
    [
        *((torch.bfloat16, mean, "output") for mean in (0, 1, 10)),
        (torch.float16, 1, "output"),
        *((dtype, 1, None) for dtype in BOUNDS),
        (torch.float32, 0, "output"),
    ],
)
def test_decays(dtype: torch.dtype, mean: float, normalize: str | None, device: torch.device) -> None:
    """A row each of random decays, of strong ones, and of retention's slowest and fastest."""
    n = length(device)
    log_decay = torch.stack(
        [
            -F.softplus(torch.randn(n)),
            *(torch.full((n,), x) for x in (-10, math.log1p(-(2**-5)), math.log1p(-(2**-8)))),
        ]
    )
    leaves = [*tokens(n, mean, dtype, device, rows=4), log_decay.to(device)]
    ours, exact = check(leaves, BOUNDS[dtype], normalize=normalize)
    # a sum may be nearly zero by chance, but the norm is not
    error, size = (ours.double() - exact).sum(-1).abs(), torch.maximum(exact.sum(-1).abs(), exact.norm(dim=-1))
    assert (error <= 0.1 * size).all(), error / size


@pytest.mark.parametrize("normalize", ["output", None])
def test_wide_features_and_splits(
    normalize: str | None, device: torch.device, in_splits: Callable[[int], None]
) -> None:
    """Several programs share the features of a row, and others its tokens."""
    in_splits(64)
    assert tiling.Shape(80, 80, torch.float16, device).over_queries().parts > 1
    leaves = [*tokens(70, 10, torch.float16, device, d=80), -torch.rand(1, 70, device=device)]
    check(leaves, BOUNDS[torch.float16], normalize=normalize)
    check(leaves[:5], BOUNDS[torch.float16], normalize=normalize)


@every_rounding
@pytest.mark.parametrize(("d", "normalize"), [(16, "output"), (80, "output"), (16, "keys"), (16, None)])
def test_half_precision_over_all_keys(
    dtype: torch.dtype, mean: float, d: int, normalize: str | None, device: torch.device
) -> None:
    leaves = tokens(length(device), mean, dtype, device, d)[:3]
    upstream, results = torch.randn_like(leaves[2]), []
    for backend, exact in (("triton", dtype), ("reference", torch.float64)):
        mine = [x.detach().to(exact).requires_grad_() for x in leaves]
        y = linear_attention(*mine, normalize=normalize, feature_map="elu_plus_one", backend=backend)
        results.append(torch.autograd.grad(y, mine, upstream.to(exact)))
    for name, a, b in zip(NAMES, *results, strict=False):
        assert (a.double() - b).norm() <= BOUNDS[dtype] * b.norm(), f"{name}: {(a.double() - b).norm() / b.norm()}"


@pytest.mark.parametrize(
    ("rubbish", "normalize", "split"),
    [(torch.nan, "output", 1000), (torch.inf, "output", 32), (torch.nan, None, 32)],
)
def test_nothing_at_a_masked_token_reaches_others(
    rubbish: float, normalize: str | None, split: int, device: torch.device, in_splits: Callable[[int], None]
) -> None:
    """All gradients are those of the sequence without it, and zero there; in splits too."""
    in_splits(split)
    leaves = [*tokens(70, 1, torch.float32, device, d=4), -torch.rand(1, 70, device=device)]
    upstream, present = upstream_of(leaves, state=1), torch.rand(70, device=device) < 0.7
    short = [x[:, present] for x in (*leaves[:3], leaves[5])]
    alone = gradients(
        [*short[:3], *leaves[3:5], short[3]],
        [upstream[0][:, present], *upstream[1:]],
        backend="triton",
        normalize=normalize,
    )
    for x in (*leaves[:3], leaves[5]):
        x[:, ~present] = rubbish
    upstream[0][:, ~present] = 0
    options = {"key_mask": present.unsqueeze(0), "backend": "triton", "normalize": normalize}
    found = gradients(leaves, upstream, **options)
    for a, b in zip((*found[:3], found[5]), (*alone[:3], alone[5]), strict=True):
        assert_close(a[:, present], b, rtol=1e-4, atol=1e-4)
        assert not a[:, ~present].any()
    assert_close(found[3:5], alone[3:5], rtol=1e-4, atol=1e-5)
    # where its own output is asked for too, it is finite
    upstream[0][:, ~present] = 1
    assert all(x.isfinite().all() for x in gradients(leaves, upstream, **options))


@pytest.mark.parametrize("feature_map", ["exp", "squared_relu"])
def test_an_infinite_slope_at_a_masked_token_is_no_gradient(feature_map: str, device: torch.device) -> None:
    q, k, v = torch.rand(3, 1, 20, 4, device=device)
    present = (torch.arange(20, device=device) % 3 > 0).unsqueeze(0)
    q, k = (x.masked_fill(~present.unsqueeze(-1), torch.inf).requires_grad_() for x in (q, k))
    y, _ = causal_linear_attention(q, k, v, key_mask=present, feature_map=feature_map, backend="triton")
    found = torch.autograd.grad(y[present].sum(), (q, k))
    assert all(g.isfinite().all() and g[present].any() and not g[~present].any() for g in found)


@pytest.mark.parametrize("feature_map", ["elu_plus_one", "exp", "squared_relu"])
def test_a_masked_step_leaves_the_state(feature_map: str, device: torch.device) -> None:
    S, z = torch.randn(4, 4, device=device), torch.rand(4, device=device)
    broken = torch.full((3, 1, 4), torch.nan, device=device)
    options = {"key_mask": torch.zeros(1, dtype=torch.bool, device=device), "feature_map": feature_map}
    y, after = causal_linear_attention(*broken, LinearState(S, z), **options, backend="triton")
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(after.S, S) and torch.equal(after.z, z)


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf])
def test_nothing_at_a_masked_key_reaches_queries(rubbish: float, device: torch.device) -> None:
    """Second derivatives too."""
    q, k, v = tokens(40, 1, torch.float32, device, d=4)[:3]
    present = torch.rand(40, device=device) < 0.7

    def derivatives(k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        y = linear_attention(*leaves, feature_map="softplus", backend="triton", **options)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

    alone = derivatives(k[:, present], v[:, present])
    k[:, ~present], v[:, ~present] = rubbish, rubbish
    for i, (a, b) in enumerate(zip(derivatives(k, v, key_mask=present), alone, strict=True)):
        assert_close(a if i % 3 == 0 else a[:, present], b, rtol=1e-4, atol=1e-5)
        assert i % 3 == 0 or not a[:, ~present].any()


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("normalize", ["output", None])
def test_heads_that_share_queries_and_keys(n: int, normalize: str | None, device: torch.device) -> None:
    q, k = (torch.rand(2, 1, n, 8, device=device) for _ in range(2))
    v, log_decay = torch.randn(2, 3, n, 5, device=device), -torch.rand(2, 3, n, device=device)
    S, z = torch.randn(2, 3, 8, 5, device=device), torch.rand(2, 3, 8, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v, S, z, log_decay)]

    def run(backend: str) -> tuple[Tensor, ...]:
        options = {"log_decay": log_decay, "normalize": normalize, "backend": backend}
        y, state = causal_linear_attention(q, k, v, LinearState(S, z), **options)
        loss = y.square().sum() + state.S.square().sum() + state.z.sum()
        return y, state.S, state.z, *torch.autograd.grad(loss, leaves)

    assert_close(run("triton"), run("reference"), rtol=1e-4, atol=1e-4)
