"""The readme's block on images, with the import changed."""

import torch

from linattn.compat.linear_attention_transformer.images import ImageLinearAttention


def test_the_readmes_block():
    attn = ImageLinearAttention(
        chan=32,
        heads=8,
        key_dim=64,  # can be decreased to 32 for more memory savings
    )

    img = torch.randn(1, 32, 256, 256)
    assert attn(img).shape == (1, 32, 256, 256)
