"""The laws of attention to all keys: `linear_attention`, and `summarize` and `read`, its two halves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, linear_attention, read, summarize
from tests import laws
from tests.laws import LENGTHS, tokens

every_backend = pytest.mark.parametrize("backend", ["chunked", "reference"])
every_normalization = pytest.mark.parametrize("normalize", ["output", "keys", None])


def attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, key_mask=None: linear_attention(q, k, v, key_mask=key_mask, **options)


@every_backend
@every_normalization
def test_agrees_with_the_formula(backend: str, normalize: str | None) -> None:
    q, k, v = tokens(6, 9, positive=True)
    mask = laws.masks(9)["holes"]
    y = linear_attention(q, k, v, key_mask=mask, normalize=normalize, backend=backend)
    for row in range(2):
        for head in range(3):
            keys, values = k[row, head, mask[row, 0]], v[row, head, mask[row, 0]]
            weights = q[row, head] @ (keys / keys.sum(0) if normalize == "keys" else keys).T
            total = weights.sum(1, keepdim=True) if normalize == "output" else 1
            assert_close(y[row, head], weights @ values / total)


@every_normalization
@pytest.mark.parametrize("feature_map", ["identity", "elu_plus_one"])
@pytest.mark.parametrize(("n", "m"), [(n, n) for n in LENGTHS] + [(3, 100), (100, 3), (2100, 1), (5, 4100), (4, 0)])
def test_outputs_and_gradients_agree_with_the_definition(
    normalize: str | None, feature_map: str, n: int, m: int
) -> None:
    inputs = [x.requires_grad_() for x in tokens(n, m, positive=True)]
    options = {"normalize": normalize, "feature_map": feature_map, "key_mask": laws.masks(m)["holes"]}
    y, expected = (linear_attention(*inputs, backend=backend, **options) for backend in ("chunked", "reference"))
    assert_close(y, expected)
    upstream = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(x, inputs, upstream) for x in (y, expected))
    assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@every_normalization
def test_the_sums_can_be_asked_many_times(normalize: str | None) -> None:
    q, k, v = tokens(30, 50)
    mask = laws.masks(50)["right"]
    state = summarize(k, v, key_mask=mask, feature_map="softplus")
    together = linear_attention(q, k, v, key_mask=mask, normalize=normalize, feature_map="softplus")
    for part in (slice(0, 1), slice(1, 30)):
        y = read(q[..., part, :], state, normalize=normalize, feature_map="softplus")
        assert_close(y, together[..., part, :])


def test_the_sums_are_those_of_the_causal_form() -> None:
    q, k, v = tokens(130, positive=True)
    state, (_, causal) = summarize(k, v), causal_linear_attention(q, k, v)
    assert_close(state[:2], causal[:2])
    last = read(q[..., -1:, :], state)
    assert_close(last, causal_linear_attention(q, k, v)[0][..., -1:, :])


@every_backend
@every_normalization
def test_gradcheck(backend: str, normalize: str | None) -> None:
    inputs = [torch.randn(2, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((4, 3), (5, 3), (5, 2))]
    attend = attention(backend=backend, normalize=normalize, feature_map="elu_plus_one")
    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


@every_backend
@every_normalization
def test_keys_may_be_permuted(backend: str, normalize: str | None) -> None:
    laws.keys_may_be_permuted(attention(backend=backend, normalize=normalize), *tokens(50, 70, positive=True))


@every_backend
@every_normalization
def test_batch_elements_do_not_mix(backend: str, normalize: str | None) -> None:
    laws.batch_elements_do_not_mix(attention(backend=backend, normalize=normalize), *tokens(50, 70, positive=True))


@every_backend
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_features_may_be_scaled(backend: str, scale: float) -> None:
    q, k, v = tokens(50, 70, positive=True)
    attend = attention(backend=backend)
    assert_close(attend(scale * q, scale * k, v), attend(q, k, v))
    laws.constant_values_come_back(attend, scale * q, k, v)


@every_backend
@every_normalization
def test_masked_keys_are_missing_keys(backend: str, normalize: str | None) -> None:
    q, k, v = tokens(20, 40)
    attend = attention(backend=backend, normalize=normalize, feature_map="elu_plus_one")
    for mask in laws.masks(40).values():
        rubbish = torch.where(mask.unsqueeze(-1), 0, torch.nan)
        y = attend(q, k + rubbish, v - rubbish, mask)
        for row, kept in enumerate(mask[:, 0]):
            assert_close(y[row], attend(q[row], k[row, :, kept], v[row, :, kept]))


@every_backend
@every_normalization
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf])
def test_what_a_masked_key_holds_reaches_no_gradient(backend: str, normalize: str | None, rubbish: float) -> None:
    for feature_map in ("softplus", "elu_plus_one"):
        attend = attention(backend=backend, normalize=normalize, feature_map=feature_map)
        mask = laws.masks(40)["holes"]
        laws.a_masked_token_has_no_effect_on_gradients(attend, *tokens(20, 40), mask, rubbish, queries=False)


@every_backend
@every_normalization
def test_the_third_derivative(backend: str, normalize: str | None) -> None:
    inputs = [torch.randn(n, d, dtype=torch.float64, requires_grad=True) for n, d in ((2, 2), (3, 2), (3, 1))]

    def gradients(*x: Tensor) -> tuple[Tensor, ...]:
        y = linear_attention(*x, normalize=normalize, feature_map="elu_plus_one", backend=backend)
        return torch.autograd.grad(y.sin().sum(), x, create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, inputs, fast_mode=True)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_close_to_float64(backend: str, dtype: torch.dtype) -> None:
    inputs = [x.to(dtype).requires_grad_() for x in tokens(300, 5000)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y = linear_attention(*inputs, feature_map="elu_plus_one", backend=backend)
    expected = linear_attention(*exact, feature_map="elu_plus_one", backend="reference")
    unit = max(torch.finfo(dtype).eps, 1e-5)
    assert y.dtype == dtype
    assert (y.double() - expected).abs().max() <= unit * expected.abs().max()
    upstream = torch.randn_like(y)
    ours, theirs = torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= 2 * unit * b.norm()


def test_mixed_dtypes_are_promoted() -> None:
    q, k, v = tokens(10, dtype=torch.float32)
    y = linear_attention(q.bfloat16(), k, v.bfloat16())
    assert y.dtype == torch.float32
    assert_close(y, linear_attention(q.bfloat16().float(), k, v.bfloat16().float()))


def test_inputs_are_not_modified() -> None:
    laws.inputs_are_not_modified(attention(feature_map="elu_plus_one"), *tokens(70), laws.masks(70)["holes"])


@pytest.mark.usefixtures("unchecked")
def test_errors_say_what_came() -> None:
    q, k, v = tokens(10, dtype=torch.float32)
    with pytest.raises(ValueError, match="backend must be one of triton, chunked, reference"):
        linear_attention(q, k, v, backend="recurrent")
    with pytest.raises(ValueError, match=r"must have S \(..., 5, dv\) .*, but has \(4, 3\) and \(4,\)"):
        read(q, LinearState(torch.zeros(4, 3), torch.zeros(4)))
    with pytest.raises(ValueError, match="boolean"):
        summarize(k, v, key_mask=torch.ones(10))
    for mask in (None, torch.ones(4, 1, 10, dtype=torch.bool)):
        with pytest.raises(ValueError, match="leading dimensions must broadcast, but are k"):
            summarize(k, v if mask is not None else v[:, :2], key_mask=mask)
    with pytest.raises(ValueError, match="leading dimensions must broadcast, but are q"):
        linear_attention(q[:, :2], k, v)
