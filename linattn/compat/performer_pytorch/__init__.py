"""The constructors of performer-pytorch 1.1.4, built from linattn's modules.

docs/compat.md has the differences, and why."""

from linattn.compat.performer_pytorch import weights
from linattn.compat.performer_pytorch.attention import Attention, CrossAttention, FastAttention, SelfAttention
from linattn.compat.performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper, top_k, top_p
from linattn.compat.performer_pytorch.kernels import (
    causal_linear_attention,
    causal_linear_attention_noncuda,
    gaussian_orthogonal_random_matrix,
    generalized_kernel,
    linear_attention,
    orthogonal_matrix_chunk,
    softmax_kernel,
)
from linattn.compat.performer_pytorch.performer import Performer, PerformerLM
from linattn.compat.performer_pytorch.performer_enc_dec import PerformerEncDec
from linattn.compat.performer_pytorch.projection_updater import ProjectionUpdater
from linattn.compat.weights.loading import CONVERSIONS

CONVERSIONS.update(weights.CONVERSIONS)

__all__ = [
    "Attention",
    "AutoregressiveWrapper",
    "CrossAttention",
    "FastAttention",
    "Performer",
    "PerformerEncDec",
    "PerformerLM",
    "ProjectionUpdater",
    "SelfAttention",
    "causal_linear_attention",
    "causal_linear_attention_noncuda",
    "gaussian_orthogonal_random_matrix",
    "generalized_kernel",
    "linear_attention",
    "orthogonal_matrix_chunk",
    "softmax_kernel",
    "top_k",
    "top_p",
]
