"""The constructors of linear-attention-transformer 0.19.1, built from linattn's modules.

docs/compat.md has the differences, and why."""

from linattn.compat.linear_attention_transformer import weights
from linattn.compat.linear_attention_transformer.autopadder import Autopadder
from linattn.compat.linear_attention_transformer.autoregressive_wrapper import AutoregressiveWrapper
from linattn.compat.linear_attention_transformer.images import ImageLinearAttention
from linattn.compat.linear_attention_transformer.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)
from linattn.compat.weights.loading import CONVERSIONS

CONVERSIONS.update(weights.CONVERSIONS)

__all__ = [
    "Autopadder",
    "AutoregressiveWrapper",
    "ImageLinearAttention",
    "LinearAttentionTransformer",
    "LinearAttentionTransformerLM",
    "LinformerContextSettings",
    "LinformerSettings",
]
