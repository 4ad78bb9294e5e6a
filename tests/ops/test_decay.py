"""What `log_decay` may be: −∞, or anything so low that it means the same, and nothing above zero."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.testing import assert_close

from linattn.attention import Decay, LinearAttention
from linattn.feature_maps import ElementwiseFeatureMap, FavorFeatureMap
from linattn.ops import causal_linear_attention, explain_backend
from linattn.ops.operators import CAUSAL
from tests.laws import masks, tokens

N = 90
every_backend = pytest.mark.parametrize("backend", [name for name in CAUSAL.run if name not in ("triton", "parallel")])
LOW = [-1e4, -1e5, -1e9, -1e15, -1e17, *(torch.finfo(x).min for x in (torch.float16, torch.bfloat16, torch.float32))]


def everything(
    backend: str, dtype: torch.dtype, low: float, dtype_of_decay: torch.dtype, **options: Any
) -> list[Tensor]:
    """Outputs, the state, and all gradients; a few tokens, and whole stretches, have the low decay."""
    n = options["key_mask"].shape[-1]
    torch.manual_seed(0)
    leaves = [x.to(dtype).requires_grad_() for x in tokens(n, positive=True)]
    log_decay = -torch.rand(2, 3, n, dtype=torch.float64)
    log_decay[..., [place for place in (0, 1, 30, 31, 32, 64, 89) if place < n]] = low
    log_decay[0, 0] = low
    log_decay = log_decay.to(dtype_of_decay).requires_grad_()
    _, past = causal_linear_attention(*(x[..., :1, :].detach() + 1 for x in leaves))
    y, state = causal_linear_attention(*leaves, past, log_decay=log_decay, backend=backend, **options)
    loss = y.square().sum() + state.S.square().sum() + state.z.square().sum()
    return [y, state.S, state.z, *torch.autograd.grad(loss, [log_decay, *leaves])]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("normalize", ["output", "keys", None])
def test_a_very_low_decay_is_minus_infinity(backend: str, dtype: torch.dtype, normalize: str | None) -> None:
    """To the last bit, and its own gradient is zero."""
    options = {"normalize": normalize, "key_mask": masks(1 if backend == "recurrent" else N)["holes"]}
    for of_decay in (torch.float64, torch.float32, torch.bfloat16):
        expected = everything(backend, dtype, -torch.inf, of_decay, **options)
        assert all(torch.isfinite(x).all() for x in expected)
        assert not expected[3][0, 0].any() and (backend == "recurrent" or expected[3].any())
        for low in LOW:
            # bfloat16 has no −10⁴, and half precision no −10¹⁷
            low = max(low * 1.01 if of_decay == torch.bfloat16 else low, torch.finfo(of_decay).min)
            found = everything(backend, dtype, low, of_decay, **options)
            assert_close(found, expected, rtol=0, atol=0)
    exact = everything("reference", torch.float64, -torch.inf, torch.float64, **options)
    found = everything(backend, dtype, -1e17, torch.float64, **options)
    unit = 1e-4 if dtype == torch.float32 else 1e-9
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.double() - theirs).norm() <= unit * (theirs.norm() + 0.1)


@every_backend
@pytest.mark.usefixtures("unchecked")
def test_a_positive_decay_is_refused(backend: str) -> None:
    q, k, v = tokens(1)
    for wrong in (torch.tensor([1e-3]), torch.full((2, 3, 1), 2.0), nn.Parameter(torch.tensor([0.5]))):
        with pytest.raises(ValueError, match=r"log_decay must not be positive, .* goes up to"):
            causal_linear_attention(q, k, v, log_decay=wrong, backend=backend)
    with pytest.raises(ValueError, match="log_decay must be floating-point"):
        causal_linear_attention(q, k, v, log_decay=torch.tensor([-1]), backend=backend)
    with pytest.raises(ValueError, match="must not be positive"):
        explain_backend(q, k, v, log_decay=torch.tensor([0.1]))


def test_a_masked_token_may_have_any_decay() -> None:
    q, k, v = tokens(5)
    log_decay, key_mask = -torch.rand(5), torch.tensor([True, False, True, True, False])
    expected, _ = causal_linear_attention(q, k, v, log_decay=log_decay, key_mask=key_mask)
    rubbish = log_decay.masked_fill(~key_mask, 7.0)
    assert_close(causal_linear_attention(q, k, v, log_decay=rubbish, key_mask=key_mask)[0], expected)


@pytest.mark.parametrize("feature_map", [ElementwiseFeatureMap("relu"), FavorFeatureMap(6, 8)])
def test_attention_refuses_a_decay_that_grows(feature_map: nn.Module) -> None:
    decay = Decay(2)
    decay.log_decay.fill_(0.1)
    inner = LinearAttention(feature_map, causal=True, decay=decay)
    with pytest.raises(ValueError, match="must not be positive"):
        inner(torch.randn(1, 4, 3, 6), torch.randn(1, 2, 3, 6), torch.randn(1, 2, 3, 6))


def test_values_that_cannot_be_read_are_not_looked_at() -> None:
    q, k, v = tokens(4, positive=True)
    log_decay = -torch.rand(2, 3, 4, dtype=torch.float64)
    log_decay[..., 2] = -1e17

    def call(*x: Tensor) -> Tensor:
        return causal_linear_attention(*x[:3], log_decay=x[3])[0]

    assert_close(vmap(call)(q, k, v, log_decay), call(q, k, v, log_decay))
    vmap(call)(q, k, v, -log_decay)
    assert call(*(x.to("meta") for x in (q, k, v, -log_decay))).shape == (2, 3, 4, 3)
