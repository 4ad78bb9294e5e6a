"""The laws of attention, each a function that takes what claims to obey it: attend(q, k, v, key_mask=None) -> y."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

Attend = Callable[..., Tensor]

LENGTHS = (0, 1, 2, 63, 64, 65, 200)


def tokens(
    n: int, m: int | None = None, *, d: int = 5, dv: int = 3, dtype: torch.dtype = torch.float64, positive: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (2, 3, n, d), keys (2, 3, m, d) and values (2, 3, m, dv); positive ones serve as features."""
    make = torch.rand if positive else torch.randn
    m = n if m is None else m
    return tuple(x.to(dtype) for x in (make(2, 3, n, d), make(2, 3, m, d), torch.randn(2, 3, m, dv)))


def masks(n: int) -> dict[str, Tensor]:
    """Keys missing on the left, on the right, here and there, and all of them, differently in each row: (2, 1, n)."""
    place, some = torch.arange(n), torch.rand(2, 1, n) < 0.6
    left = place >= torch.tensor([n // 3, n // 2])[:, None, None]
    return {"left": left, "right": left.flip(-1), "holes": some, "all": torch.zeros_like(some)}


def the_past_does_not_see_the_future(attend: Attend, q: Tensor, k: Tensor, v: Tensor, at: int, rtol: float = 0) -> None:
    """Bitwise, unless sums are taken in another order."""
    before = attend(q, k, v)
    for factor in (1, 10, 1000):
        k2, v2 = k.clone(), v.clone()
        k2[..., at:, :] = factor * torch.rand_like(k2[..., at:, :])
        v2[..., at:, :] = factor
        after = attend(q, k2, v2)
        assert_close(after[..., :at, :], before[..., :at, :], rtol=rtol, atol=rtol)
        assert not torch.allclose(after[..., at:, :], before[..., at:, :])


def the_last_token_sees_everything(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    v = v.clone().requires_grad_()
    attend(q, k, v)[..., -1, :].sum().backward()
    assert v.grad is not None and (v.grad.abs().amax(-1) > 0).all()


def a_masked_key_is_a_missing_key(attend: Attend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, **to: Any) -> None:
    """Compared with the sequence without it; whatever stands in its place, infinities too, has no effect."""
    rubbish = torch.where(key_mask.unsqueeze(-1), 0, torch.inf)
    y = attend(q, k + rubbish, v - rubbish, key_mask=key_mask)
    for row, kept in enumerate(key_mask[:, 0]):
        alone = attend(*(x[row : row + 1, :, kept] for x in (q, k, v)))
        assert_close(y[row : row + 1, :, kept], alone, **to)
    assert torch.isfinite(y).all()


def a_masked_token_has_no_effect_on_gradients(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, rubbish: float, *, queries: bool, **to: Any
) -> None:
    """Compared with the sequence without it. Its key and value hold rubbish, and its query if queries are masked too."""
    upstream = torch.randn(*q.shape[:-1], v.shape[-1], dtype=v.dtype)
    absent = ~key_mask.unsqueeze(-1)
    if queries:
        upstream = upstream.masked_fill(absent, 0)
        q = q.masked_fill(absent, rubbish)
    leaves = [x.clone().requires_grad_() for x in (q, k.masked_fill(absent, rubbish), v.masked_fill(absent, rubbish))]
    y = attend(*leaves, key_mask=key_mask)
    gradients = torch.autograd.grad(y, leaves, upstream)
    for row, kept in enumerate(key_mask[:, 0]):
        asking = kept if queries else torch.ones_like(upstream[0, 0, :, 0], dtype=torch.bool)
        places = (asking, kept, kept)
        alone = [x[row : row + 1, :, at].detach().requires_grad_() for x, at in zip((q, k, v), places, strict=True)]
        y_alone = attend(*alone)
        assert_close(y[row : row + 1, :, asking], y_alone, **to)
        expected = torch.autograd.grad(y_alone, alone, upstream[row : row + 1, :, asking])
        for gradient, other, at in zip(gradients, expected, places, strict=True):
            assert_close(gradient[row : row + 1, :, at], other, **to)
            assert not gradient[row, :, ~at].any()


def batch_elements_do_not_mix(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **to: Any) -> None:
    together = attend(q, k, v)
    for row in range(len(q)):
        one = slice(row, row + 1)
        assert_close(attend(q[one], k[one], v[one]), together[one], **to)


def constant_values_come_back(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **to: Any) -> None:
    assert_close(attend(q, k, torch.full_like(v, 7.0)), torch.full_like(attend(q, k, v), 7.0), **to)


def keys_may_be_permuted(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **to: Any) -> None:
    order = torch.randperm(k.shape[-2])
    assert_close(attend(q, k[..., order, :], v[..., order, :]), attend(q, k, v), **to)


def inputs_are_not_modified(attend: Attend, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> None:
    copies = [x.clone() for x in (q, k, v, key_mask)]
    attend(q, k, v, key_mask=key_mask)
    for x, copy in zip((q, k, v, key_mask), copies, strict=True):
        assert torch.equal(x, copy)
