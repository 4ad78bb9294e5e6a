"""Weights of linear-attention-transformer 0.19.1."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linattn.attention.axial import AxialAttention
from linattn.attention.base import InnerAttention
from linattn.attention.blindspot import BlindspotAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.rotary import RotaryAttention
from linattn.attention.split_heads import SplitHeads
from linattn.compat.linear_attention_transformer import (
    ImageLinearAttention,
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)
from linattn.compat.linear_attention_transformer.options import MODEL_RULES, STACK_RULES
from linattn.compat.options import effective
from linattn.compat.weights import layers
from linattn.compat.weights.conversion import (
    ONES,
    SAME,
    ZEROS,
    Change,
    Conversion,
    Move,
    columns,
    heads,
    pairs_as_halves,
    parameters,
)
from linattn.nn import Branch, Chunked, GatedFeedForward, MultiheadAttention, Projected

# accepted there, and without effect
IGNORED = ("bucket_size", "pkm_num_keys", "pkm_layers")


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for theirs, as their constructor understood them."""
    if config.get("pkm_layers"):
        raise ValueError("product key memories (pkm_layers) have no counterpart here: their layers cannot be loaded")
    arguments = {name: value for name, value in config.items() if name not in IGNORED}
    kinds = {"linformer_settings": LinformerSettings, "context_linformer_settings": LinformerContextSettings}
    for name, kind in kinds.items():
        if arguments.get(name) is not None:
            arguments[name] = kind(*arguments[name])
    if arguments.get("linformer_settings") is not None:
        # all heads of such a layer are projected there, local ones too
        arguments["n_local_attn_heads"] = 0
    return arguments


def _build_language_model(config: Mapping[str, Any]) -> LinearAttentionTransformerLM:
    arguments = effective(LinearAttentionTransformerLM, MODEL_RULES, _arguments(config))
    model = LinearAttentionTransformerLM(**arguments)
    if config.get("use_rotary_emb"):
        for module in model.modules():
            if isinstance(module, MultiheadAttention) and not module.is_cross_attention:
                _turn_linear_heads(module)
    return model


def _turn_linear_heads(module: MultiheadAttention) -> None:
    """Add rotary positions to the linear heads: the weights have learned with them, but our constructor has none."""
    if isinstance(module.inner, SplitHeads):
        module.inner = SplitHeads(*((count, _with_rotary(part)) for count, part in layers.parts(module)))
    else:
        module.inner = _with_rotary(module.inner)


def _with_rotary(inner: InnerAttention) -> InnerAttention:
    return RotaryAttention(inner) if isinstance(inner, LinearAttention | BlindspotAttention) else inner


def _language_model(model: LinearAttentionTransformerLM, _: bool) -> Iterator[Move]:
    yield from layers.language_model(model, "out")
    if isinstance(model.stack, Projected):
        yield from parameters("stack.in_proj", "transformer.project_in", model.stack.in_proj)
        if model.stack.out_proj is not None:
            yield from parameters("stack.out_proj", "transformer.project_out", model.stack.out_proj)
        yield from _stack("stack.stack", "transformer.fn.layers", model.stack.stack)
    else:
        yield from _stack("stack", "transformer.layers", model.stack)


def _transformer(model: LinearAttentionTransformer, _: bool) -> Iterator[Move]:
    yield from _stack("stack", "layers", model.stack)


def _image(model: ImageLinearAttention, _: bool) -> Iterator[Move]:
    yield from (Move(name, name, SAME) for name in model.state_dict())


def _stack(ours: str, theirs: str, stack: nn.Module) -> Iterator[Move]:
    main = True
    for name, their_name, branch in layers.branches(stack):
        mine, its = f"{ours}.{name}", f"{theirs}.{their_name}"
        yield from layers.around(mine, its, branch)
        if isinstance(branch.module, MultiheadAttention):
            folded = isinstance(branch.module.inner, AxialAttention)
            main = not folded and not branch.module.is_cross_attention
            inside = layers.inside(its, branch, wrappers=folded)
            yield from _attention(f"{mine}.module", inside, branch.module)
        else:
            yield from _feed_forward(f"{mine}.module", layers.inside(its, branch, wrappers=1), branch, main)


def _feed_forward(ours: str, theirs: str, branch: Branch, main: bool) -> Iterator[Move]:
    """Move a feed-forward. After self attention theirs is never gated, whatever `ff_glu` is: our gate is always one."""
    module = branch.module
    if isinstance(module, Chunked):
        ours, module = f"{ours}.module", module.module
    if not (main and isinstance(module, GatedFeedForward)):
        yield from layers.feed_forward(ours, theirs, module)
        return
    yield from parameters(f"{ours}.gate_proj", f"{theirs}.w1", module.gate_proj)
    yield Move(f"{ours}.up_proj.weight", None, ZEROS)
    yield Move(f"{ours}.up_proj.bias", None, ONES)
    yield from parameters(f"{ours}.down_proj", f"{theirs}.w2", module.down_proj)


def _attention(ours: str, theirs: str, module: MultiheadAttention) -> Iterator[Move]:
    if layers.is_linformer(module):
        yield from layers.linformer(ours, theirs, module)
        return
    parts, d = layers.parts(module), module.head_dim
    turned = heads([(count, _order(part)) for count, part in parts], d)
    factors = torch.cat([torch.full((count * d,), _factor(part, d), dtype=torch.float64) for count, part in parts])
    yield from layers.attention(ours, theirs, module, q=turned, k=turned, columns=_unless_one(factors))


def _order(part: InnerAttention) -> Callable[[Tensor], Tensor]:
    return pairs_as_halves if isinstance(part, RotaryAttention) else SAME.apply


def _factor(part: InnerAttention, head_dim: int) -> float:
    """Return d^-½ for the heads whose outputs they multiply by it: linear ones that are not causal."""
    part = part.inner if isinstance(part, RotaryAttention) else part
    return head_dim**-0.5 if isinstance(part, LinearAttention) and not part.causal else 1.0


def _unless_one(factors: Tensor) -> Change:
    return SAME if (factors == 1).all() else columns(factors)


CONVERSIONS: dict[type[nn.Module], Conversion] = {
    LinearAttentionTransformerLM: Conversion(
        _build_language_model, _language_model, roots=("token_emb.",), left_out=layers.TABLES
    ),
    LinearAttentionTransformer: Conversion(
        lambda config: LinearAttentionTransformer(
            **effective(LinearAttentionTransformer, STACK_RULES, _arguments(config))
        ),
        _transformer,
        roots=("layers.layers.", "layers.blocks."),
    ),
    ImageLinearAttention: Conversion(lambda config: ImageLinearAttention(**config), _image, roots=("to_q.",)),
}
