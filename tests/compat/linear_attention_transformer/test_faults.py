"""What linear-attention-transformer gets wrong or refuses, as laws. Padding, pieces, reversible gradients, copies and
half precision are laws of every constructor, in tests/compat/test_laws.py; wrappers have a file of their own."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from linattn.attention import LinearAttention
from linattn.compat.linear_attention_transformer import LinearAttentionTransformer, LinearAttentionTransformerLM
from linattn.nn import GatedFeedForward, MultiheadAttention
from tests.compat.constructors import has_window
from tests.compat.linear_attention_transformer.original import original

SIZES = {"num_tokens": 11, "dim": 16, "depth": 1, "heads": 4, "max_seq_len": 64}


def lm(**options: Any) -> LinearAttentionTransformerLM:
    window = {"local_attn_window_size": 8} if has_window(options, lm=True) else {}
    return LinearAttentionTransformerLM(**(SIZES | window | options)).eval()


def some_tokens(n: int = 40, b: int = 2) -> torch.Tensor:
    return torch.randint(11, (b, n))


def test_the_gated_feed_forward_is_theirs():
    """Which theirs makes only for the axial and the context layers."""
    theirs = original.FeedForward(16, glu=True).double()
    (ours,) = [m for m in lm(ff_glu=True).double().modules() if isinstance(m, GatedFeedForward)]
    with torch.no_grad():
        theirs.w1.weight.copy_(torch.cat([ours.gate_proj.weight, ours.up_proj.weight]))
        theirs.w1.bias.copy_(torch.cat([ours.gate_proj.bias, ours.up_proj.bias]))
        theirs.w2.load_state_dict(ours.down_proj.state_dict())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("factor", "tolerance"), [(30, 0.2), (1000, torch.inf)], ids=["near", "finite"])
def test_large_keys_do_not_overflow(causal, dtype, factor, tolerance):
    """Of standard deviations of 17 and 600; theirs is not finite from 32 on, in fp16 from 4."""
    model, x = lm(causal=causal, blindspot_size=4 if causal else 1, n_local_attn_heads=2), some_tokens()
    with torch.no_grad():
        for attention in (m for m in model.modules() if isinstance(m, MultiheadAttention)):
            attention.k_proj.weight.mul_(factor)
        exact = model.double()(x)
        y = model.to(dtype)(x)
    assert torch.isfinite(y).all()
    assert (y.double() - exact).norm() / exact.norm() < (tolerance if dtype != torch.float32 else tolerance / 1e4)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_may_be_shifted(causal):
    """Softmax's weights do not change; theirs are 95 % off at a shift of −12."""
    model = lm(causal=causal).double()
    (inner,) = [m for m in model.modules() if isinstance(m, LinearAttention)]
    q, k, v = torch.randn(3, 2, 4, 30, 64, dtype=torch.float64)
    for shift in (-12, -300, 300):
        assert_close(inner(q, k + shift, v), inner(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_constant_values_come_back(causal):
    """Theirs, not causal, are smaller by √d."""
    (inner,) = [m for m in lm(causal=causal).double().modules() if isinstance(m, LinearAttention)]
    q, k, v = torch.randn(3, 2, 4, 30, 64, dtype=torch.float64)
    assert_close(inner(q, k, torch.full_like(v, 7)), torch.full_like(v, 7))


def test_without_a_present_token_nothing_breaks():
    """Theirs attends to the padding, the future's too."""
    for causal in (False, True):
        model, x = lm(causal=causal, n_local_attn_heads=2, shift_tokens=True).double(), some_tokens()
        mask = torch.ones(2, 40, dtype=torch.bool)
        mask[1] = False
        y = model(x, input_mask=mask)
        assert torch.isfinite(y).all()
        assert_close(y[0], model(x[:1])[0])


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({"emb_dim": 6, "return_embeddings": True}, 40),
        ({"attend_axially": True, "use_rotary_emb": True, "n_local_attn_heads": 1}, 40),
        ({"attend_axially": True}, 37),
        ({"n_local_attn_heads": 2}, 37),
        ({"n_local_attn_heads": 2, "causal": True, "blindspot_size": 8}, 37),
        ({"n_local_attn_heads": (0,), "max_seq_len": 50}, 50),
        ({"n_local_attn_heads": 2, "max_seq_len": 50, "use_axial_pos_emb": False}, 50),
        ({"use_rotary_emb": True, "dim_head": 5, "n_local_attn_heads": 2}, 40),
        ({"use_rotary_emb": True, "emb_dim": 7}, 40),
        ({"dim": 15, "dim_head": 4, "attend_axially": True}, 40),
    ],
    ids=str,
)
def test_what_looks_legal_is(options, n):
    """Each is an error there."""
    model = lm(**options)
    with warnings.catch_warnings(action="error"):
        model(some_tokens(n)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_any_number_of_local_heads_and_lengths_of_a_stack():
    """`max_seq_len` is of positions and of Linformer: a stack alone has neither."""
    model = LinearAttentionTransformer(dim=16, depth=1, max_seq_len=8, heads=4, n_local_attn_heads=4)
    assert model(torch.randn(1, 131, 16)).shape == (1, 131, 16)


def test_autocast_trains_reversible_models():
    model, x = lm(reversible=True, causal=True, n_local_attn_heads=2), some_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
