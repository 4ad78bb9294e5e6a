"""performer-pytorch 1.1.4 itself, to compare with: the constant in its causal denominator is left out."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    # distutils, at its import
    warnings.simplefilter("ignore", DeprecationWarning)
    pytest.importorskip("performer_pytorch")
    from performer_pytorch import performer_pytorch as original

from linattn.compat.performer_pytorch import FastAttention


def fast_attention(ours: FastAttention, **options: Any) -> torch.nn.Module:
    """Theirs with our random features, without the 1e-6 in the causal denominator."""
    theirs = original.FastAttention(ours.dim_heads, ours.nb_features, causal=ours.causal, **options).double()
    if ours.projection_matrix is not None:
        theirs.projection_matrix.copy_(ours.projection_matrix)
    theirs.causal_linear_fn = partial(original.causal_linear_attention_noncuda, eps=0)
    return theirs
