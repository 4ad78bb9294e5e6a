"""performer-pytorch 1.1.4 itself with our weights, to compare with; the constant in its causal denominator left out."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    # distutils, at its import
    warnings.simplefilter("ignore", DeprecationWarning)
    pytest.importorskip("performer_pytorch")
    from performer_pytorch import performer_pytorch as original

from linattn.compat.performer_pytorch import FastAttention, Performer
from linattn.feature_maps import RandomProjection
from linattn.nn import Branch, Chunked, GatedFeedForward, MultiheadAttention


def fast_attention(ours: FastAttention, **options: Any) -> nn.Module:
    options["nb_features"] = ours.nb_features
    theirs = original.FastAttention(ours.dim_heads, causal=ours.causal, **options).double()
    return take_features(theirs, ours)


def take_features(theirs: nn.Module, ours: nn.Module, order: Tensor | None = None) -> nn.Module:
    for part in ours.modules():
        if isinstance(part, RandomProjection):
            theirs.projection_matrix.copy_(part.rows if order is None else part.rows[:, order])
    theirs.causal_linear_fn = partial(original.causal_linear_attention_noncuda, eps=0)
    return theirs


def take_linear(theirs: nn.Linear, ours: nn.Linear, order: Tensor | None = None) -> None:
    for name, tensor in ours.named_parameters():
        getattr(theirs, name).copy_(tensor if order is None else tensor[order])


def neighbours(channels: int) -> Tensor:
    """Their rotary pairs are neighbours, ours the two halves: where each of their channels is among ours."""
    return torch.arange(channels).view(2, -1).T.flatten()


@torch.no_grad()
def take_attention(theirs: nn.Module, ours: MultiheadAttention, rotary: bool = False) -> nn.Module:
    """Fast heads come first in both; only they have rotary positions of neighbours."""
    heads, channels = theirs.heads, ours.head_dim
    order = torch.arange(channels).repeat(heads, 1)
    if rotary:
        order[: theirs.global_heads] = neighbours(channels)
    rows = (order + channels * torch.arange(heads)[:, None]).flatten()
    take_linear(theirs.to_q, ours.q_proj, rows), take_linear(theirs.to_k, ours.k_proj, rows)
    take_linear(theirs.to_v, ours.v_proj), take_linear(theirs.to_out, ours.o_proj)
    if hasattr(theirs, "fast_attention"):
        take_features(theirs.fast_attention, ours.inner, neighbours(channels) if rotary else None)
    return theirs


def take_feed_forward(theirs: nn.Module, ours: nn.Module) -> None:
    ours = ours.module if isinstance(ours, Chunked) else ours
    take_linear(theirs.w2, ours.down_proj)
    if isinstance(ours, GatedFeedForward):
        theirs.w1.weight.copy_(torch.cat([ours.gate_proj.weight, ours.up_proj.weight]))
        theirs.w1.bias.copy_(torch.cat([ours.gate_proj.bias, ours.up_proj.bias]))
    else:
        take_linear(theirs.w1, ours.up_proj)


@torch.no_grad()
def take_branch(theirs: nn.Module, ours: Branch, rotary: bool) -> None:
    if ours.g is not None:
        theirs.g.copy_(ours.g)
    elif hasattr(theirs, "g"):
        theirs.g.copy_(ours.norm.g)
    else:
        theirs.norm.load_state_dict(ours.norm.state_dict())
    while hasattr(theirs, "fn"):
        theirs = theirs.fn
    if isinstance(ours.module, MultiheadAttention):
        take_attention(theirs, ours.module, rotary and not ours.is_cross_attention)
    else:
        take_feed_forward(theirs, ours.module)


def performer(ours: Performer, options: dict[str, Any], rotary: bool = False) -> nn.Module:
    """Theirs, of the same options, in float64 and evaluation."""
    return take_performer(original.Performer(**options).double().eval(), ours, rotary)


def take_performer(theirs: nn.Module, ours: Performer, rotary: bool = False) -> nn.Module:
    if hasattr(theirs.net, "blocks"):
        pairs = [part for block in theirs.net.blocks for part in (block.f.net, block.g.net)]
    else:
        pairs = [part for layer in theirs.net.layers for part in layer]
    for their_branch, branch in zip(pairs, ours.net.branches, strict=True):
        take_branch(their_branch, branch, rotary)
    return theirs
