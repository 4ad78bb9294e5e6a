"""The original's main module. The language model serves as encoder, too, if it returns embeddings, and as decoder."""

import math
from collections.abc import Iterator
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.attention import (
    InnerAttention,
    LearnedProjection,
    LinearAttention,
    LinformerAttention,
    LocalAttention,
    RotaryAttention,
)
from linattn.compat.layers import Pair, efficient_attention, inner_parts, make_pair, make_stack, split_heads
from linattn.compat.linear_attention_transformer.axial import AxialAttention
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from linattn.compat.linear_attention_transformer.options import LinformerContextSettings as LinformerContextSettings
from linattn.compat.linear_attention_transformer.options import LinformerSettings as LinformerSettings
from linattn.compat.linear_attention_transformer.options import TransformerOptions
from linattn.compat.options import takes
from linattn.models.token_model import TokenModel, TokenModelState, run_stack
from linattn.nn import AxialPositions, LearnedPositions, MultiheadAttention, Projected, SinusoidalPositions
from linattn.nn.branch import Call
from linattn.types import Context, ContextMask, TokenIds, TokenMask, Tokens

ROTATED = "rotary_linear_heads"


@final
class LinearAttentionTransformer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), `depth` times. Local heads attend to a window, all others
    to the whole sequence by linear attention. There are no positions and no last norm. Causal ones have `extend`.

    Only Linformer's projections limit the length, to `max_seq_len`: any other stack takes any length."""

    @takes(
        TransformerOptions,
        "dim depth max_seq_len heads dim_head * causal ff_chunks ff_glu ff_dropout attn_layer_dropout attn_dropout "
        "reversible blindspot_size n_local_attn_heads local_attn_window_size receives_context attend_axially "
        "linformer_settings context_linformer_settings shift_tokens rotary",
    )
    def __init__(self, options: TransformerOptions):
        super().__init__()
        self.stack, self.max_seq_len, self.causal = _stack(options), options.max_seq_len, options.causal
        self.receives_context, self.pad_to_multiple = options.receives_context, options.pad_to_multiple

    def forward(
        self, x: Tokens, input_mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Tokens:
        """Apply the layers. The masks are True where a token is present."""
        call = Call(input_mask, context, context_mask).checked(self.receives_context, "receives_context is False")
        return run_stack(self.stack, self.causal, x, call)

    def extend(
        self,
        x: Tokens,
        state: Any = None,
        input_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Tokens, Any]:
        """Return the outputs for the next tokens after those of `state`, and the new state. A context is given in the
        first call, with `state` None; then the state holds it."""
        call = Call(input_mask, context, context_mask).checked(self.receives_context, "receives_context is False")
        return self.stack.extend(x, state, **call._asdict())


@final
class LinearAttentionTransformerLM(TokenModel):
    """Embeddings with positions, a `LinearAttentionTransformer`, a norm and the logits (`return_embeddings` leaves them
    out). If causal, `linattn.generate` takes it.

    Positions are those of a grid, `local_attn_window_size` wide, by default. With `use_axial_pos_emb=False` they are
    learned, one for each of `max_seq_len` tokens. With `use_rotary_emb` they are sinusoids, of any length, and local
    heads are rotary. All count present tokens only, so padding on the left moves none.

    A `state_dict` with `rotary_linear_heads` comes from a model that loaded the original's weights, whose linear heads
    are rotary, too. Loading it makes the linear heads of this model rotary."""

    @takes(
        TransformerOptions,
        "num_tokens dim depth max_seq_len heads dim_head causal emb_dim reversible ff_chunks ff_glu ff_dropout "
        "attn_layer_dropout attn_dropout blindspot_size n_local_attn_heads local_attn_window_size return_embeddings "
        "receives_context * attend_axially linformer_settings context_linformer_settings use_axial_pos_emb "
        "use_rotary_emb shift_tokens",
        dim_head=64,
    )
    def __init__(self, options: TransformerOptions):
        super().__init__()
        self.max_seq_len, self.causal, self.tied = options.max_seq_len, options.causal, False
        self.receives_context, self.pad_to_multiple = options.receives_context, options.pad_to_multiple
        dim = options.dim
        width = dim if options.emb_dim is None else options.emb_dim
        out = dim if options.return_embeddings else width
        self.embedding = nn.Embedding(options.num_tokens, width)
        self.positions = _positions(options, width)
        self.dropout = nn.Identity()
        stack = _stack(options)
        self.stack = stack if width == dim else Projected(stack, width, dim, out_dim=None if out == dim else out)
        self.norm = nn.LayerNorm(out)
        self.head = None if options.return_embeddings else nn.Linear(width, options.num_tokens)
        self.register_load_state_dict_pre_hook(_rotate_if_marked)

    def rotate_linear_heads(self) -> None:
        """Add rotary positions to the linear heads if the local heads have them: the original's weights were trained
        so. From then on the `state_dict` has an entry `rotary_linear_heads`."""
        if not isinstance(self.positions, SinusoidalPositions) or hasattr(self, ROTATED):
            return
        self.register_buffer(ROTATED, torch.ones((), dtype=torch.bool))
        for module in self.modules():
            if isinstance(module, MultiheadAttention) and is_self_attention(module):
                linear = LinearAttention, BlindspotAttention
                parts = [(n, RotaryAttention(x) if isinstance(x, linear) else x) for n, x in inner_parts(module)]
                module.inner = split_heads(*parts)

    def forward(
        self, x: TokenIds, input_mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Float[Tensor, "b n o"]:
        """Return the logits of each token, or its embedding. The masks are True where a token is present."""
        y = self.hidden(x, key_mask=input_mask, context=context, context_mask=context_mask)
        return self.logits(y) if self.gives_logits else y

    def extend(
        self,
        x: TokenIds,
        state: TokenModelState | None = None,
        input_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Float[Tensor, "b n o"], TokenModelState]:
        """Return the outputs for the next tokens after those of `state`, and the new state. A context is given in the
        first call, with `state` None; then the state holds it."""
        y, state = self.extend_hidden(x, state, key_mask=input_mask, context=context, context_mask=context_mask)
        return self.logits(y) if self.gives_logits else y, state


def is_self_attention(attention: MultiheadAttention) -> bool:
    """Return True for attention that is neither axial nor to a context."""
    return not attention.is_cross_attention and not isinstance(attention.inner, AxialAttention)


def _rotate_if_marked(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix + ROTATED in state_dict:
        model.rotate_linear_heads()


def _positions(options: TransformerOptions, width: int) -> SinusoidalPositions | AxialPositions | LearnedPositions:
    """Return positions of `width` channels. Learned tables, one or one per axis, begin as an nn.Embedding does."""
    longest, window = options.max_seq_len, options.local_attn_window_size
    if options.use_rotary_emb:
        return SinusoidalPositions(width)
    if options.use_axial_pos_emb is False:
        return LearnedPositions(longest, width, std=1.0)
    # each axis is as large, not their sum
    return AxialPositions(width, (math.ceil(longest / window), window), max_length=longest, std=math.sqrt(2))


def _stack(options: TransformerOptions) -> Any:
    options.check()
    return make_stack(options, _pairs(options), "mean")


def _pairs(options: TransformerOptions) -> Iterator[Pair]:
    """Yield self attention, axial attention and attention to the context of each layer, each with a feed-forward."""
    shift = None
    if options.shift_tokens:
        shift = (1, 0) if options.causal else (1, 0, -1)
    for local_heads in options.local_counts:
        self_attention = _attention(options, _self_attention(options, local_heads), options.channels)
        yield make_pair(options, self_attention, shift=shift)
        if options.attend_axially:
            inner = AxialAttention(efficient_attention(options.causal), options.local_attn_window_size)
            # dim / heads whatever dim_head is, so that the package's weights fit
            channels = options.channels if options.dim % options.heads else options.dim // options.heads
            yield make_pair(options, _attention(options, inner, channels))
        if options.receives_context:
            settings = options.context_linformer_settings
            inner = efficient_attention(False) if settings is None else _linformer(*settings)
            yield make_pair(options, _attention(options, inner, options.channels, context_dim=options.dim))


def _attention(
    options: TransformerOptions, inner: InnerAttention, channels: int, *, context_dim: int | None = None
) -> MultiheadAttention:
    return MultiheadAttention(
        options.dim,
        options.heads,
        inner,
        head_dim=channels,
        context_dim=context_dim,
        out_bias=True,
        dropout=options.attn_layer_dropout,
        hidden_dropout=options.attn_dropout,
    )


def _self_attention(options: TransformerOptions, local_heads: int) -> InnerAttention:
    """Return the attention of a layer's heads, local ones first."""
    local: InnerAttention = LocalAttention(options.local_attn_window_size, causal=options.causal, bucketed=True)
    if options.rotary or options.use_rotary_emb:
        local = RotaryAttention(local)
    others: InnerAttention = efficient_attention(options.causal)
    if options.linformer_settings is not None:
        others = _linformer(options.max_seq_len, *options.linformer_settings)
    elif options.blindspot_size > 1:
        others = BlindspotAttention(others, options.blindspot_size)
    return split_heads((local_heads, local), (options.heads - local_heads, others))


def _linformer(longest: int, projected: int) -> LinformerAttention:
    return LinformerAttention(LearnedProjection(longest, projected), LearnedProjection(longest, projected))
