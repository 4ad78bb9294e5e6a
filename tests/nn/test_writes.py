"""Several writes per token: the definition, a token and a write at a time, in float64."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.attention import named_attention
from linattn.attention.gates import needs_strength
from linattn.nn import MultiheadAttention
from tests.attention.cases import CAUSAL, GATED

DIM, HEADS, KEY_HEADS, WIDTH = 24, 4, 2, 6
DELTA = [name for name in GATED if needs_strength(named_attention(name, num_heads=1, head_dim=2, causal=True).needs)]


def attention(name: str, writes: int, **options) -> MultiheadAttention:
    inner = named_attention(name, num_heads=HEADS, head_dim=WIDTH, num_key_heads=KEY_HEADS, causal=True)
    module = MultiheadAttention(DIM, HEADS, inner, num_key_heads=KEY_HEADS, writes=writes, **options)
    return module.double()


def defined(module: MultiheadAttention, x: Tensor, key_mask: Tensor) -> Tensor:
    """S ← diag(α) S, then for each write S ← S + β k (v − Sᵀ k)ᵀ; y = Sᵀ q / √d."""
    b, n, writes = *x.shape[:2], module.writes
    q = module.q_proj(x).view(b, n, KEY_HEADS, HEADS // KEY_HEADS, WIDTH)
    k, v = (p(x).view(b, n, KEY_HEADS, writes, WIDTH) for p in (module.k_proj, module.v_proj))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    parts = module.gates(x) if isinstance(module.gates(x)[-1], tuple) else (module.gates(x),)
    beta = torch.cat([part.beta for part in parts], 1).view(b, KEY_HEADS, n, writes)
    log_decay = [torch.zeros(b, KEY_HEADS, n) if part.log_decay is None else part.log_decay for part in parts]
    log_decay = [x.unsqueeze(-1).expand(*x.shape[:3], WIDTH) if x.ndim == 3 else x for x in log_decay]
    alpha = torch.cat(log_decay, 1).exp().unsqueeze(-1)
    S, ys = x.new_zeros(b, KEY_HEADS, WIDTH, WIDTH), []
    for t in range(n):
        new = alpha[:, :, t] * S
        for w in range(writes):
            error = v[:, t, :, w] - torch.einsum("bhkv,bhk->bhv", new, k[:, t, :, w])
            new = new + torch.einsum("bh,bhk,bhv->bhkv", beta[:, :, t, w], k[:, t, :, w], error)
        S = torch.where(key_mask[:, t, None, None, None], new, S)
        ys.append(torch.einsum("bhkv,bhgk->bhgv", S, q[:, t]).flatten(1) / WIDTH**0.5)
    return module.o_proj(torch.stack(ys, 1))


@pytest.mark.parametrize("name", [*DELTA, "kda+gated_delta"])
@pytest.mark.parametrize("writes", [1, 2, 3])
def test_is_as_defined(name, writes):
    module = attention(name, writes, beta_limit=2.0)
    x = torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 9) < 0.8
    own, expected = (f[mask] for f in (module(x, key_mask=mask), defined(module, x, mask)))
    assert_close(own, expected)
    inputs, dy = (x, *module.parameters()), torch.randn_like(own)
    assert_close(*(torch.autograd.grad(y, inputs, dy) for y in (own, expected)))


def test_rotations_are_of_tokens():
    """All keys of a token are turned alike, and the query as they are."""
    module, x = attention("delta", 2, rotary=100.0), torch.randn(1, 8, DIM, dtype=torch.float64)
    q, k, *_ = module._project(x, None, None, None)
    module.rotary = None
    plain_q, plain_k, *_ = module._project(x, None, None, None)
    products = q[..., 1::2, :] @ k.repeat_interleave(2, 1).mT
    plain = plain_q[..., 1::2, :] @ plain_k.repeat_interleave(2, 1).mT
    own = torch.arange(8)
    for write in (0, 1):
        assert_close(products[..., own, 2 * own + write], plain[..., own, 2 * own + write])
    assert not torch.allclose(products, plain)


def test_values_skip_with_the_last_write():
    module, x = attention("delta", 2, value_skip=True), torch.randn(1, 5, DIM, dtype=torch.float64)
    y = module(x)
    with torch.no_grad():
        module.value_skip.zero_()
    v = module.v_proj(x).view(1, 5, KEY_HEADS, 2, WIDTH)[..., 1, :].repeat_interleave(2, 2)
    assert_close(y - module(x), module.o_proj(v.flatten(2)))


@pytest.mark.parametrize("name", [*sorted({name for name, causal in CAUSAL} - {*DELTA}), "local+delta"])
def test_other_attention_writes_once(name):
    inner = named_attention(name, num_heads=4, head_dim=6, causal=True, window=5, max_length=9)
    with pytest.raises(ValueError, match="writes is of attentions with the delta rule in every head, but is 2"):
        MultiheadAttention(DIM, 4, inner, writes=2)
