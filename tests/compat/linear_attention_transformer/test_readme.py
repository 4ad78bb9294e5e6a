"""The readme's examples, with the import changed, on the CPU, at the sizes that are printed, but with one layer."""

import torch

from linattn.compat.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)


def test_language_model():
    model = LinearAttentionTransformerLM(
        num_tokens=20000,
        dim=512,
        heads=8,
        depth=1,
        max_seq_len=8192,
        causal=True,
        ff_dropout=0.1,
        attn_layer_dropout=0.1,
        attn_dropout=0.1,
        emb_dim=128,
        dim_head=128,
        blindspot_size=64,
        n_local_attn_heads=4,
        local_attn_window_size=128,
        reversible=True,
        ff_chunks=2,
        ff_glu=True,
        attend_axially=False,
        shift_tokens=True,
    )
    x = torch.randint(0, 20000, (1, 8192))
    # its comment says (1, 8192, 512): a model without return_embeddings gives logits
    assert model(x).shape == (1, 8192, 20000)


def test_transformer():
    model = LinearAttentionTransformer(dim=512, heads=8, depth=1, max_seq_len=8192, n_local_attn_heads=4)
    assert model(torch.randn(1, 8192, 512)).shape == (1, 8192, 512)


def test_encoder_and_decoder():
    enc = LinearAttentionTransformerLM(
        num_tokens=20000,
        dim=512,
        heads=8,
        depth=1,
        max_seq_len=4096,
        reversible=True,
        n_local_attn_heads=4,
        return_embeddings=True,
    )
    dec = LinearAttentionTransformerLM(
        num_tokens=20000,
        dim=512,
        heads=8,
        depth=1,
        causal=True,
        max_seq_len=4096,
        reversible=True,
        receives_context=True,
        n_local_attn_heads=4,
    )
    src = torch.randint(0, 20000, (1, 4096))
    src_mask = torch.ones_like(src).bool()
    tgt = torch.randint(0, 20000, (1, 4096))
    tgt_mask = torch.ones_like(tgt).bool()
    context = enc(src, input_mask=src_mask)
    logits = dec(tgt, context=context, input_mask=tgt_mask, context_mask=src_mask)
    assert context.shape == (1, 4096, 512) and logits.shape == (1, 4096, 20000)


def test_linformer():
    settings = LinformerSettings(k=256)
    enc = LinearAttentionTransformerLM(
        num_tokens=20000, dim=512, heads=8, depth=1, max_seq_len=4096, linformer_settings=settings
    )
    assert enc(torch.randint(0, 20000, (1, 4096))).shape == (1, 4096, 20000)


def test_linformer_for_the_context():
    settings = LinformerContextSettings(seq_len=2048, k=256)
    dec = LinearAttentionTransformerLM(
        num_tokens=20000,
        dim=512,
        heads=8,
        depth=1,
        max_seq_len=4096,
        causal=True,
        context_linformer_settings=settings,
        receives_context=True,
    )
    tokens, context = torch.randint(0, 20000, (1, 1024)), torch.randn(1, 2048, 512)
    assert dec(tokens, context=context).shape == (1, 1024, 20000)
