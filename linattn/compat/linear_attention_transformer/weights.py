"""Weights of linear-attention-transformer 0.19.1."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from linattn.attention import LinearAttention, LinformerAttention, RotaryAttention
from linattn.compat.layers import inner_parts
from linattn.compat.linear_attention_transformer.axial import AxialAttention
from linattn.compat.linear_attention_transformer.linear_attention_transformer import (
    ROTATED,
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    is_self_attention,
)
from linattn.compat.linear_attention_transformer.options import TransformerOptions
from linattn.compat.options import effective
from linattn.compat.weights import conversion, layers
from linattn.compat.weights.conversion import Conversion, Move, Moves, renamed, within
from linattn.nn import GatedFeedForward, ImageLinearAttention, MultiheadAttention, Projected

# accepted there, and without effect
WITHOUT_EFFECT = ("bucket_size", "pkm_num_keys", "pkm_layers")


def _arguments(constructor: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our constructor's arguments for the model that the original constructor makes from `config`."""
    if config.get("pkm_layers"):
        raise ValueError("product key memories (pkm_layers) have no counterpart here: their layers cannot be loaded")
    arguments = {name: value for name, value in config.items() if name not in WITHOUT_EFFECT}
    if arguments.get("linformer_settings") is not None:
        # all heads of such a layer are projected there, local ones too
        arguments["n_local_attn_heads"] = 0
    return effective(TransformerOptions, constructor, arguments)


def _language_model(model: LinearAttentionTransformerLM, _: bool) -> Moves:
    yield from layers.language_model(model, "out")
    stack = model.stack
    if not isinstance(stack, Projected):
        yield from within("stack", "transformer", _stack(stack))
        return
    yield from renamed(model, {"stack.in_proj": "transformer.project_in", "stack.out_proj": "transformer.project_out"})
    yield from within("stack.stack", "transformer.fn", _stack(stack.stack))


def _stack(stack: nn.Module) -> Moves:
    yield from within("", "layers", layers.stack(stack, _attention, _feed_forward))


def _feed_forward(module: nn.Module, before: MultiheadAttention) -> Moves:
    """Yield the moves of a feed-forward after the attention `before`. After self attention, the original ignores
    `ff_glu` and has no gate, so ours becomes the constant 1."""
    if isinstance(module, GatedFeedForward) and is_self_attention(before):
        yield from renamed(module, {"gate_proj": "w1", "down_proj": "w2"})
        yield Move("up_proj.weight", None, conversion.ZEROS)
        yield Move("up_proj.bias", None, conversion.ONES)
    else:
        yield from layers.feed_forward(module, before)


def _attention(module: MultiheadAttention) -> Moves:
    if isinstance(module.inner, LinformerAttention):
        yield from layers.linformer(module)
        return
    d, orders, factors = module.head_dim, [], []
    for count, part in inner_parts(module):
        rotary = isinstance(part, RotaryAttention)
        inner = part.inner if isinstance(part, (AxialAttention, RotaryAttention)) else part
        orders.append((count, conversion.pairs_as_halves if rotary else conversion.SAME.apply))
        # they multiply the outputs of linear heads that are not causal by d^-½
        factors += [d**-0.5 if isinstance(inner, LinearAttention) and not inner.causal else 1.0] * count * d
    turned, columns = conversion.heads(orders, d), conversion.columns(torch.tensor(factors, dtype=torch.float64))
    moves = layers.attention(module, q=turned, k=turned, columns=columns)
    # their axial attention is in a wrapper, which folds the sequence
    yield from within("", "fn" if isinstance(module.inner, AxialAttention) else "", moves)


CONVERSIONS: dict[type[nn.Module], Conversion] = {
    LinearAttentionTransformerLM: Conversion(
        _language_model,
        roots=("token_emb.",),
        arguments=_arguments,
        adapt=LinearAttentionTransformerLM.rotate_linear_heads,
        left_out=layers.TABLES,
        new=(ROTATED,),
    ),
    LinearAttentionTransformer: Conversion(
        lambda model, _: within("stack", "", _stack(model.stack)),
        roots=("layers.layers.", "layers.blocks."),
        arguments=_arguments,
    ),
    ImageLinearAttention: Conversion(
        lambda model, _: (Move(name, name) for name in model.state_dict()), roots=("to_q.",)
    ),
}
