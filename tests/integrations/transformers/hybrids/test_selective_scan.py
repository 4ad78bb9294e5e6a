"""The laws of the selective scan: its definition is the recurrence, in torch's own operations."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.integrations.transformers.hybrids import selective_scan as module
from linattn.integrations.transformers.hybrids.selective_scan import SELECTIVE_SCAN, ScanCall, selective_scan
from tests.laws import LENGTHS


def inputs(
    n: int, lead: tuple[int, ...] = (3,), c: int = 5, d: int = 4, dtype: torch.dtype = torch.float64
) -> ScanCall:
    """Return values, positive time steps, negative rates, keys and queries. Some decays are strong, some weak."""
    v, delta, B, C = (torch.randn(*lead, n, size, dtype=dtype) for size in (c, c, d, d))
    rates = -torch.randn(*lead, d, c, dtype=dtype).mul(2).exp()
    return ScanCall(*(x.requires_grad_() for x in (v, delta.exp(), rates, B, C)))


def recurrence(call: ScanCall) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state, token by token."""
    v, delta, A, B, C = call
    S, y = torch.zeros_like(A), []
    for i in range(v.shape[-2]):
        S = S * torch.exp(delta[..., i, None, :] * A) + B[..., i, :, None] * v[..., i, None, :]
        y.append((C[..., i, :, None] * S).sum(-2))
    return torch.stack(y, -2), S


@pytest.mark.parametrize("backend", SELECTIVE_SCAN.run)
@pytest.mark.parametrize("n", [n for n in LENGTHS if n])
@pytest.mark.parametrize("block", [1, 600, 2**18])
def test_outputs_states_and_gradients_agree_with_the_recurrence(
    monkeypatch: pytest.MonkeyPatch, backend: str, n: int, block: int
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "CHUNK", 16)
    if block == 1 and n == 200:
        return
    call = inputs(n)
    found, expected = SELECTIVE_SCAN.choose(call, backend)(call), recurrence(call)
    close = {"rtol": 1e-12, "atol": 1e-12}
    assert_close(found, expected, **close)
    upstream = [torch.randn_like(x) for x in expected]
    for outputs in ([0], [1], [0, 1]):
        ours, exact = (
            torch.autograd.grad(
                [results[i] for i in outputs],
                call,
                [upstream[i] for i in outputs],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for results in (found, expected)
        )
        assert_close(ours, exact, **close)


@pytest.mark.parametrize("backend", SELECTIVE_SCAN.run)
def test_no_tokens(backend: str) -> None:
    call = inputs(0)
    y, S = SELECTIVE_SCAN.choose(call, backend)(call)
    assert y.shape == call.v.shape
    assert torch.equal(S, torch.zeros_like(call.A))


def test_decays_of_any_strength_are_finite() -> None:
    call = inputs(200, dtype=torch.float32)
    strong = call._replace(A=call.A.detach().mul(1e4).requires_grad_(), delta=call.delta.detach().mul(100))
    y, S = selective_scan(*strong)
    assert y.isfinite().all() and S.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum() + S.sum(), [strong.A, strong.v]))


def test_derivatives_of_any_order() -> None:
    for n in (1, 3):
        call = inputs(n, (1,), 2, 2)
        assert torch.autograd.gradcheck(selective_scan, tuple(call))
        assert torch.autograd.gradgradcheck(selective_scan, tuple(call), fast_mode=True)


def test_vmap_is_a_loop() -> None:
    many = inputs(70, (2, 3))
    found = torch.vmap(selective_scan)(*many)
    assert_close(found, recurrence(many))
    gradient = torch.func.grad(lambda *call: selective_scan(*call)[0].sin().sum(), argnums=tuple(range(5)))
    each = [gradient(*call) for call in zip(*many, strict=True)]
    assert_close(torch.vmap(gradient)(*many), tuple(map(torch.stack, zip(*each, strict=True))))


def test_strided_inputs() -> None:
    call = inputs(70)
    strided = ScanCall(*(x.detach().mT.contiguous().mT.requires_grad_() for x in call))
    found, expected = selective_scan(*strided), selective_scan(*call)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(y.square().sum(), x) for (y, _), x in ((found, strided), (expected, call))))


def test_no_tensor_of_tokens_channels_and_states_is_saved() -> None:
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    n, c, d = 640, 8, 16
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        selective_scan(*inputs(n, (1,), c, d))
    assert sum(x.numel() for x in saved) <= n * (2 * c + 2 * d) + (n // module.CHUNK + 1) * c * d
