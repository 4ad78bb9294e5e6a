import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.attention import InnerAttention, LinearAttention
from linattn.compat.performer_pytorch.floored_favor import FlooredFavorAttention
from linattn.feature_maps import FavorFeatureMap
from tests import laws

EPSILON = 1e-3


def make(causal: bool, epsilon: float = EPSILON) -> FlooredFavorAttention:
    return FlooredFavorAttention(FavorFeatureMap(5, 11), epsilon=epsilon, causal=causal).double()


def define(inner: FlooredFavorAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From the formula, and each causal output from its own prefix."""
    if inner.causal:
        ys = [one(inner, q[..., i : i + 1, :], k[..., : i + 1, :], v[..., : i + 1, :]) for i in range(q.shape[-2])]
        return torch.cat([torch.zeros_like(v[..., :0, :]), *ys], -2)
    return one(inner, q, k, v)


def one(inner: FlooredFavorAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = inner.feature_map.projection.rows
    (pq, hq), (pk, hk) = ((x @ rows.mT / 5**0.25, x.square().sum(-1, keepdim=True) / 5**0.5 / 2) for x in (q, k))
    phi_q = (pq - hq).exp() + inner.epsilon * pq.amax(-1, keepdim=True).exp()
    phi_k = (pk - hk).exp() + inner.epsilon * pk.amax((-1, -2), keepdim=True).exp()
    weights = phi_q @ phi_k.mT
    return weights / weights.sum(-1, keepdim=True) @ v


both = pytest.mark.parametrize("causal", [False, True])


@both
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65])
def test_agrees_with_the_definition(causal, n):
    inner, x = make(causal), laws.tokens(n)
    assert_close(inner(*x), define(inner, *x))


@both
def test_no_token(causal):
    assert make(causal)(*laws.tokens(0)).shape == (2, 3, 0, 3)


def test_a_query_without_keys_gets_zeros():
    assert not make(False)(*laws.tokens(3, 0)).any()


@both
def test_gradients_are_those_of_the_definition(causal):
    inner, x = make(causal), [t[:1, :1].requires_grad_() for t in laws.tokens(7)]
    actual = torch.autograd.grad(inner(*x).sin().sum(), x)
    expected = torch.autograd.grad(define(inner, *x).sin().sum(), x)
    assert_close(actual, expected)
    assert torch.autograd.gradcheck(inner, x)


def by_pieces(inner: InnerAttention, x: tuple[Tensor, ...], cuts: list[int], key_mask: Tensor | None = None) -> Tensor:
    ys, state = [], None
    for start, stop in itertools.pairwise([0, *cuts, x[0].shape[-2]]):
        mask = None if key_mask is None else key_mask[..., start:stop]
        y, state = inner.extend(*(t[..., start:stop, :] for t in x), state, key_mask=mask)
        ys.append(y)
    return torch.cat(ys, -2)


@pytest.mark.parametrize("masked", [False, True])
def test_pieces_make_the_whole(masked):
    inner, x = make(True), [t.requires_grad_() for t in laws.tokens(65)]
    key_mask = laws.masks(65)["left"] if masked else None
    whole, pieces = inner(*x, key_mask=key_mask), by_pieces(inner, x, [1, 30, 30, 64], key_mask)
    assert_close(pieces, whole)
    # through the maximum that a state carries too
    for a, b in zip(torch.autograd.grad(pieces.sin().sum(), x), torch.autograd.grad(whole.sin().sum(), x), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("cut", [1, 32, 64])
def test_the_past_does_not_see_the_future(cut):
    laws.the_past_does_not_see_the_future(make(True), *laws.tokens(65), cut)


@both
def test_laws(causal):
    inner, x = make(causal), laws.tokens(63)
    for key_mask in laws.masks(63).values():
        laws.a_masked_key_is_a_missing_key(inner, *x, key_mask)
        laws.inputs_are_not_modified(inner, *x, key_mask)
    laws.batch_elements_do_not_mix(inner, *x)
    laws.constant_values_come_back(inner, *x)
    laws.the_last_token_sees_everything(inner, *x)
    if not causal:
        laws.keys_may_be_permuted(inner, *x)


@both
def test_masks_leave_gradients_that_are_numbers(causal):
    inner, x = make(causal), [(100 * t).requires_grad_() for t in laws.tokens(20)]
    key_mask = laws.masks(20)["left"]
    key_mask[0] = False
    inner(*x, key_mask=key_mask).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in x)


@both
def test_query_heads_may_share_key_heads(causal):
    inner, (q, k, v) = make(causal), laws.tokens(20)
    k, v = k[:, :1], v[:, :1]
    assert_close(inner(q, k, v), inner(q, k.expand(2, 3, 20, 5), v.expand(2, 3, 20, 3)))


@both
def test_without_a_floor_it_is_linear_attention(causal):
    inner, x = make(causal, 1e-13), laws.tokens(40)
    assert_close(inner(*x), LinearAttention(inner.feature_map, causal=causal)(*x))
    assert not torch.allclose(make(causal, 1e-2)(*x), inner(*x))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(causal, dtype):
    inner, x = make(causal), laws.tokens(500)
    x = [t.to(dtype) for t in x]
    y = inner(*x)
    assert y.dtype == dtype
    assert_close(y.double(), define(inner, *(t.double() for t in x)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("std", [1, 10, 100])
def test_any_range(std):
    q, k, v = laws.tokens(65, dtype=torch.float32)
    for causal in (False, True):
        y = make(causal)(q * std, k * std, v)
        assert torch.isfinite(y).all() and (y.abs() <= v.abs().max() + 1e-4).all()


def test_an_epsilon_of_zero_is_refused():
    with pytest.raises(ValueError, match="positive"):
        make(True, 0.0)


def test_the_causal_form_has_the_same_features():
    inner, x = make(False), laws.tokens(9)
    form = inner.as_causal()
    assert_close(form(*x), define(form, *x))
    assert not inner.causal and form.feature_map is inner.feature_map
