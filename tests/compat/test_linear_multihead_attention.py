"""Every block of the readme of linear-multihead-attention, with the import changed; and what was wrong there."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.compat.linear_multihead_attention import LinearMultiheadAttention


def test_torchs_own():
    embed_dim, num_heads = 64, 8
    query = key = value = torch.randn(20, 2, embed_dim)

    multihead_attn = torch.nn.MultiheadAttention(embed_dim, num_heads)
    attn_output, attn_output_weights = multihead_attn(query, key, value)

    assert attn_output.shape == (20, 2, 64) and attn_output_weights.shape == (2, 20, 20)


@pytest.mark.parametrize("length", [512, 20])
def test_the_linear_one(length):
    embed_dim, num_heads = 64, 8
    query = key = value = torch.randn(length, 2, embed_dim)

    multihead_attn = LinearMultiheadAttention(embed_dim, num_heads)
    attn_output, attn_output_weights = multihead_attn(query, key, value)

    assert attn_output.shape == (length, 2, 64)
    # over the projected keys: 128 of them
    assert attn_output_weights.shape == (2, length, 128)
    assert_close(attn_output_weights.sum(-1), torch.ones(2, length))


def test_with_the_sequence_length():
    embed_dim, num_heads = 64, 8
    query = key = value = torch.randn(512, 2, embed_dim)

    multihead_attn = LinearMultiheadAttention(embed_dim, num_heads, seq_len=512, proj_k=256, param_sharing="layerwise")
    attn_output, attn_output_weights = multihead_attn(query, key, value)

    assert attn_output.shape == (512, 2, 64) and attn_output_weights.shape == (2, 512, 256)


class TransformerEncoderLayer(nn.Module):
    """DETR's layer; the readme's own line for it passes seq_len to nn.MultiheadAttention, which cannot be meant."""

    def __init__(self, d_model, nhead, dropout, w, h):
        super().__init__()
        self.self_attn = LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=w * h, proj_k=64)

    def forward(self, src, mask, pos):
        q = k = src + pos
        return src + self.self_attn(q, k, value=src, key_padding_mask=mask)[0]


class TransformerDecoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dropout, num_queries, w, h):
        super().__init__()
        self.self_attn = LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=num_queries, proj_k=64)
        self.multihead_attn = LinearMultiheadAttention(d_model, nhead, dropout=dropout, seq_len=w * h, proj_k=64)

    def forward(self, tgt, query_pos, memory, mask, pos):
        q = k = tgt + query_pos
        tgt = tgt + self.self_attn(q, k, value=tgt)[0]
        return (
            tgt + self.multihead_attn(query=tgt + query_pos, key=memory + pos, value=memory, key_padding_mask=mask)[0]
        )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_three_lines_of_detr(dropout):
    """Two images in one batch, the second smaller: what is beside it has no effect on it, nor has the first."""
    num_queries, (bs, c, h, w) = 10, (2, 32, 9, 12)
    encoder = TransformerEncoderLayer(c, 4, dropout, w, h).double()
    decoder = TransformerDecoderLayer(c, 4, dropout, num_queries, w, h).double()
    src, pos = torch.randn(2, bs, c, h, w, dtype=torch.float64)
    mask = torch.zeros(bs, h, w, dtype=torch.bool)
    mask[1, 6:], mask[1, :, 7:] = True, True
    query_pos = torch.randn(num_queries, bs, c, dtype=torch.float64)

    def run(src, pos, mask, query_pos):
        src, pos = src.flatten(2).permute(2, 0, 1), pos.flatten(2).permute(2, 0, 1)
        memory = encoder(src, mask.flatten(1), pos)
        return decoder(torch.zeros_like(query_pos), query_pos, memory, mask.flatten(1), pos)

    y = run(src, pos, mask, query_pos)
    assert y.shape == (num_queries, bs, c) and torch.isfinite(y).all()
    if dropout == 0:
        src[0], src[1, :, 6:], src[1, :, :, 7:] = 7, 7, 7
        assert_close(run(src, pos, mask, query_pos)[:, 1], y[:, 1])
        small = (src[1:, :, :6, :7], pos[1:, :, :6, :7], mask[1:, :6, :7], query_pos[:, 1:])
        assert_close(run(*small)[:, 0], y[:, 1])


def test_the_originals_arguments_keep_their_order():
    attention = LinearMultiheadAttention(16, 4, 0.1, True, False, False, 5, 6, 32, 8, "headwise")
    assert (attention.dropout, attention.kdim, attention.vdim) == (0.1, 5, 6)
    assert (attention.projection.max_length, attention.projection.projected_length) == (32, 8)
    assert attention.projection.weight.shape == (8, 32)
