"""The Performer walk-through, class by class and function by function, with only the import changed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.compat.performer_pytorch import (
    Attention,
    CrossAttention,
    FastAttention,
    Performer,
    PerformerLM,
    ProjectionUpdater,
    SelfAttention,
    causal_linear_attention,
    causal_linear_attention_noncuda,
    gaussian_orthogonal_random_matrix,
    generalized_kernel,
    linear_attention,
    orthogonal_matrix_chunk,
    softmax_kernel,
)
from linattn.feature_maps import RandomProjection


def heads(n: int = 100) -> list[torch.Tensor]:
    return [torch.randn(1, 8, n, 64) for _ in range(3)]


@pytest.mark.parametrize("generalized_attention", [False, True])
def test_fast_attention_step_by_step(generalized_attention):
    """Its `forward`, by hand: create_projection, create_kernel, attn_fn."""
    q, k, v = heads()
    device = q.device
    create_projection = partial(gaussian_orthogonal_random_matrix, nb_rows=266, nb_columns=64, scaling=0)
    projection_matrix = create_projection(device=device)
    attention = FastAttention(64, generalized_attention=generalized_attention, kernel_fn=nn.ReLU())
    attention.projection_matrix.copy_(projection_matrix)
    if generalized_attention:
        create_kernel = partial(
            generalized_kernel, kernel_fn=nn.ReLU(), projection_matrix=projection_matrix, device=device
        )
        q1, k1 = map(create_kernel, (q, k))
    else:
        create_kernel = partial(softmax_kernel, projection_matrix=projection_matrix, device=device)
        q1 = create_kernel(q, is_query=True)
        k1 = create_kernel(k, is_query=False)
    assert_close(linear_attention(q1, k1, v), attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_fast_attention_without_projection():
    q, k, v = heads()
    attention = FastAttention(64, no_projection=True)
    assert_close(linear_attention(q.softmax(dim=-1), k.softmax(dim=-2), v), attention(q, k, v))
    attention = FastAttention(64, no_projection=True, causal=True)
    for attend in (causal_linear_attention, causal_linear_attention_noncuda):
        y = attend(q.softmax(dim=-1), torch.exp(k), v)
        assert_close(y, attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_causal_linear_attention_is_a_recurrence():
    """S_t = S_{t−1} + k_t, Z_t = Z_{t−1} + k_t v_tᵀ, out_t = q_tᵀ Z_t / q_tᵀ S_t."""
    q, k, v = (x.double().exp() for x in heads(33))
    S, Z, outs = torch.zeros(1, 8, 64).double(), torch.zeros(1, 8, 64, 64).double(), []
    for t in range(33):
        S = S + k[:, :, t]
        Z = Z + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        outs.append((q[:, :, t].unsqueeze(-2) @ Z).squeeze(-2) / (q[:, :, t] * S).sum(-1, keepdim=True))
    assert_close(causal_linear_attention_noncuda(q, k, v, chunk_size=8), torch.stack(outs, -2))
    assert_close(causal_linear_attention(q, k, v), torch.stack(outs, -2))


def test_redraw_projection_matrix():
    attention = FastAttention(dim_heads=64, nb_features=100, ortho_scaling=1)
    before = attention.projection_matrix.clone()
    attention.redraw_projection_matrix(torch.device("cpu"))
    assert not torch.equal(attention.projection_matrix, before)


def test_projection_updater():
    model = nn.Sequential(FastAttention(64))
    updater = ProjectionUpdater(model, 2)
    assert updater.instance is model and updater.calls_since_last_redraw == 0
    before = model[0].projection_matrix.clone()
    for _ in range(3):
        updater.redraw_projections()
    assert not torch.equal(model[0].projection_matrix, before) and updater.calls_since_last_redraw == 1
    updater.fix_projections_()
    before = model[0].projection_matrix.clone()
    for _ in range(5):
        updater.redraw_projections()
    assert torch.equal(model[0].projection_matrix, before)


@pytest.mark.parametrize("kind", [Attention, SelfAttention])
def test_attention(kind):
    x, mask = torch.randn(1, 300, 512), torch.ones(1, 300, dtype=torch.bool)
    attention = kind(512, causal=True, heads=8, dim_head=64, local_heads=2, local_window_size=256, dropout=0.1)
    assert attention(x, mask=mask).shape == x.shape


@pytest.mark.parametrize("kind", [Attention, CrossAttention])
def test_cross_attention(kind):
    x, context, mask = torch.randn(1, 30, 512), torch.randn(1, 50, 512), torch.ones(1, 50, dtype=torch.bool)
    assert kind(512, heads=8, nb_features=64)(x, context=context, context_mask=mask).shape == x.shape


def test_orthogonal_matrix_chunk():
    assert orthogonal_matrix_chunk(64, device="cpu").shape == (64, 64)


def test_performer():
    x, mask = torch.randn(1, 200, 64), torch.ones(1, 200, dtype=torch.bool)
    model = Performer(64, 2, 4, 16, (0, 2), 64, True, 4, None, 1000, True, 2, False, nn.ReLU(), True)
    model(x, mask=mask).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    model.fix_projection_matrices_()
    rows = [module.rows.clone() for module in model.modules() if isinstance(module, RandomProjection)]
    for _ in range(3):
        model(x, mask=mask)
    assert rows and all(map(torch.equal, rows, (m.rows for m in model.modules() if isinstance(m, RandomProjection))))


def test_performer_lm():
    model = PerformerLM(
        num_tokens=200,
        max_seq_len=256,
        dim=64,
        depth=2,
        heads=4,
        dim_head=16,
        local_attn_heads=(2, 1),
        causal=True,
        reversible=True,
        ff_glu=True,
        rotary_position_emb=True,
        qkv_bias=True,
        attn_out_bias=True,
        shift_tokens=True,
    )
    x, mask = torch.randint(0, 200, (1, 256)), torch.ones(1, 256, dtype=torch.bool)
    assert model(x, mask=mask).shape == (1, 256, 200)
    assert model(x, return_encodings=True).shape == (1, 256, 64)
    model.check_redraw_projections()
    model.fix_projection_matrices_()
