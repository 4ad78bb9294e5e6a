"""linear-attention-transformer 0.19.1 on our parts: the same constructors, `from
linattn.compat.linear_attention_transformer import …`. docs/compat.md has the differences, and why."""

from linattn.compat.linear_attention_transformer.autopadder import Autopadder
from linattn.compat.linear_attention_transformer.autoregressive_wrapper import AutoregressiveWrapper
from linattn.compat.linear_attention_transformer.images import ImageLinearAttention
from linattn.compat.linear_attention_transformer.language_model import LinearAttentionTransformerLM
from linattn.compat.linear_attention_transformer.layers import LinformerContextSettings, LinformerSettings
from linattn.compat.linear_attention_transformer.transformer import LinearAttentionTransformer

__all__ = [
    "Autopadder",
    "AutoregressiveWrapper",
    "ImageLinearAttention",
    "LinearAttentionTransformer",
    "LinearAttentionTransformerLM",
    "LinformerContextSettings",
    "LinformerSettings",
]
