"""`from linear_multihead_attention import LinearMultiheadAttention`, with our attention behind it."""

from linattn.integrations.torch import LinearMultiheadAttention

__all__ = ["LinearMultiheadAttention"]
