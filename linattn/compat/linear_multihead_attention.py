"""`from linear_multihead_attention import LinearMultiheadAttention`, with our attention behind it."""

from linattn.nn.linear_multihead import LinearMultiheadAttention

__all__ = ["LinearMultiheadAttention"]
