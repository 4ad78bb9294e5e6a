"""`from linear_attention_transformer.images import ImageLinearAttention`, with our attention behind it."""

from linattn.nn.image import ImageLinearAttention

__all__ = ["ImageLinearAttention"]
