"""linear-attention-transformer 0.19.1 itself with our weights, to compare with: its factor d^-½ on the outputs of heads
that see all tokens is taken out of its output projection, where it has them."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("linear_attention_transformer")
import linear_attention_transformer as package
from linear_attention_transformer import linear_attention_transformer as original

from linattn.attention.base import InnerAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.linformer import LinformerAttention
from linattn.attention.split_heads import SplitHeads
from linattn.compat.linear_attention_transformer import LinearAttentionTransformer, LinearAttentionTransformerLM
from linattn.compat.linear_attention_transformer.axial import AxialAttention
from linattn.nn import Branch, Chunked, GatedFeedForward, MultiheadAttention, Projected

__all__ = ["original", "package", "take_language_model", "take_transformer"]


@torch.no_grad()
def take_transformer(theirs: nn.Module, ours: LinearAttentionTransformer) -> nn.Module:
    _take_stack(theirs.double(), ours.stack)
    return theirs.eval()


@torch.no_grad()
def take_language_model(theirs: nn.Module, ours: LinearAttentionTransformerLM) -> nn.Module:
    model, theirs = ours, theirs.double()
    theirs.token_emb.weight.copy_(model.embedding.weight)
    if model.positions is not None:
        weights = list(theirs.pos_emb.parameters())
        for table, weight in zip(weights, model.positions.parameters(), strict=True):
            table.copy_(weight.view_as(table))
    stack, transformer = model.stack, theirs.transformer
    if isinstance(stack, Projected):
        _take_linear(transformer.project_in, stack.in_proj)
        if stack.out_proj is not None:
            _take_linear(transformer.project_out, stack.out_proj)
        stack, transformer = stack.stack, transformer.fn
    _take_stack(transformer, stack)
    _take_linear(theirs.norm, model.norm)
    if model.head is not None:
        _take_linear(theirs.out, model.head)
    return theirs.eval()


def _take_stack(theirs: nn.Module, ours: nn.Module) -> None:
    layers = theirs.layers
    if isinstance(layers, original.ReversibleSequence):
        sublayers = [half.net for block in layers.blocks for half in (block.f, block.g)]
    else:
        sublayers = [sublayer for layer in layers.layers for sublayer in layer]
    for sublayer, branch in zip(sublayers, ours.branches, strict=True):
        assert isinstance(branch, Branch)
        _take_linear(sublayer.norm, branch.norm)
        _take_module(_innermost(sublayer), branch.module)


def _innermost(module: nn.Module) -> nn.Module:
    while hasattr(module, "fn"):
        module = module.fn
    return module


def _take_module(theirs: nn.Module, ours: nn.Module) -> None:
    if isinstance(ours, MultiheadAttention):
        _take_attention(theirs, ours)
        return
    ours = ours.module if isinstance(ours, Chunked) else ours
    if isinstance(ours, GatedFeedForward):
        theirs.w1.weight.copy_(torch.cat([ours.gate_proj.weight, ours.up_proj.weight]))
        theirs.w1.bias.copy_(torch.cat([ours.gate_proj.bias, ours.up_proj.bias]))
    else:
        _take_linear(theirs.w1, ours.up_proj)
    _take_linear(theirs.w2, ours.down_proj)


def _take_attention(theirs: nn.Module, ours: MultiheadAttention) -> None:
    for target, source in (("to_q", "q_proj"), ("to_k", "k_proj"), ("to_v", "v_proj"), ("to_out", "o_proj")):
        _take_linear(getattr(theirs, target), getattr(ours, source))
    if isinstance(ours.inner, LinformerAttention):
        theirs.proj_k.copy_(ours.inner.key_projection.weight.T)
        theirs.proj_v.copy_(ours.inner.value_projection.weight.T)
        return
    factors = [factor for count, part in _parts(ours) for factor in [_factor(part, ours.head_dim)] * count]
    per_head = torch.tensor(factors, dtype=torch.float64)
    theirs.to_out.weight.mul_(per_head.repeat_interleave(ours.head_dim))


def _parts(attention: MultiheadAttention) -> list[tuple[int, InnerAttention]]:
    inner = attention.inner.inner if isinstance(attention.inner, AxialAttention) else attention.inner
    if isinstance(inner, SplitHeads):
        return list(zip(inner.heads, inner.parts, strict=True))
    return [(attention.o_proj.in_features // attention.head_dim, inner)]


def _factor(part: InnerAttention, head_dim: int) -> float:
    return head_dim**0.5 if isinstance(part, LinearAttention) and not part.causal else 1.0


def _take_linear(theirs: nn.Module, ours: nn.Module | Tensor) -> None:
    for name, tensor in ours.named_parameters():
        getattr(theirs, name).copy_(tensor)
