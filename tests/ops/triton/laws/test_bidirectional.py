"""The laws of attention to all keys with the kernels, against the definition in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import linear_attention, read, summarize
from tests import laws


def tokens(n: int, m: int, device: torch.device, f: int = 5, dv: int = 3, lead: Any = (2, 1)) -> list[Tensor]:
    q, k, v = torch.rand(*lead, n, f), torch.rand(*lead, m, f), torch.randn(*lead, m, dv)
    return [x.to(device) for x in (q, k, v)]


def compare(leaves: list[Tensor], tolerance: float, **options: Any) -> None:
    results = []
    noise = None
    for backend, dtype in (("triton", None), ("reference", torch.float64)):
        mine = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
        y = linear_attention(*mine, backend=backend, **options)
        noise = torch.randn_like(y) if noise is None else noise
        results.append([y, *torch.autograd.grad(y, mine, noise.to(y.dtype))])
    for name, ours, exact in zip(("y", "dq", "dk", "dv"), *results, strict=True):
        error = (ours.double() - exact).norm()
        assert error <= tolerance * exact.norm() + 1e-5, f"{name}: {error / exact.norm()}"


@pytest.mark.parametrize(
    ("n", "m", "normalize"),
    [
        *((n, m, "output") for n, m in ((0, 3), (3, 0), (1, 1), (64, 65), (63, 2), (3, 130), (130, 3))),
        *((n, m, normalize) for n, m in ((3, 0), (35, 70)) for normalize in ("keys", None)),
    ],
)
def test_outputs_and_gradients_agree_with_the_definition(
    n: int, m: int, normalize: str | None, device: torch.device
) -> None:
    compare(tokens(n, m, device), 1e-5, normalize=normalize, key_mask=laws.masks(m)["holes"].to(device))


@pytest.mark.parametrize(("f", "dv"), [(1, 1), (200, 100)])
def test_every_width(f: int, dv: int, device: torch.device) -> None:
    compare(tokens(5, 20, device, f, dv, lead=(1,)), 1e-5)


def test_sequences_in_splits(device: torch.device, in_splits: Callable[[int], None]) -> None:
    in_splits(32)
    compare(tokens(70, 100, device), 1e-5, feature_map="softplus", key_mask=laws.masks(100)["left"].to(device))


def test_no_keys_are_where_a_chunk_is_not_full(device: torch.device) -> None:
    """Features of zeros are no zeros."""
    compare(tokens(5, 45, device), 1e-5, feature_map="elu_plus_one")


def test_rows_that_share_keys(device: torch.device) -> None:
    q, _, _ = tokens(20, 1, device, lead=(2, 2, 3))
    _, k, v = tokens(1, 30, device, lead=(2, 1))
    compare([q, k, v], 1e-5)
    compare([q[0, 0, 0], k, v], 1e-5)


def test_the_sums_can_be_asked_many_times(device: torch.device) -> None:
    q, k, v = tokens(30, 50, device)
    state = summarize(k, v, feature_map="softplus")
    together = linear_attention(q, k, v, feature_map="softplus", backend="triton")
    for part in (slice(0, 1), slice(1, 30)):
        y = read(q[..., part, :], state, feature_map="softplus")
        assert_close(y, together[..., part, :], rtol=1e-5, atol=1e-5)


def test_keys_may_be_permuted(device: torch.device) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, backend="triton")

    laws.keys_may_be_permuted(attend, *tokens(20, 45, device), rtol=1e-4, atol=1e-5)


def test_masked_keys_are_missing_keys(device: torch.device) -> None:
    q, k, v = tokens(10, 40, device)
    mask = laws.masks(40)["holes"].to(device)
    rubbish = torch.where(mask.unsqueeze(-1), 0, torch.nan)
    y = linear_attention(q, k + rubbish, v - rubbish, key_mask=mask, backend="triton")
    for row, kept in enumerate(mask[:, 0]):
        alone = linear_attention(q[row], k[row, :, kept], v[row, :, kept], backend="triton")
        assert_close(y[row], alone, rtol=1e-4, atol=1e-5)
