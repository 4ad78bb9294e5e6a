"""The layers of a `LinearAttentionTransformer`, built from the package's arguments."""

from collections.abc import Iterator
from functools import partial

from torch import nn

from linattn.attention import (
    AxialAttention,
    BlindspotAttention,
    InnerAttention,
    LearnedProjection,
    LinearAttention,
    LinformerAttention,
    LocalAttention,
    RotaryAttention,
)
from linattn.compat.layers import Pair, head_channels, make_feed_forward, make_pair, make_stack, split_heads
from linattn.compat.linear_attention_transformer.options import TransformerOptions
from linattn.feature_maps import EfficientFeatureMap
from linattn.nn import MultiheadAttention, ResidualSequence, ReversibleSequence


def make_layers(options: TransformerOptions) -> ResidualSequence | ReversibleSequence:
    options.check()
    return make_stack(_pairs(options), options.reversible, "mean")


def _pairs(options: TransformerOptions) -> Iterator[Pair]:
    """Yield self attention, axial attention and attention to the context of each layer, each with a feed-forward."""
    shift = None
    if options.shift_tokens:
        shift = (1, 0) if options.causal else (1, 0, -1)
    channels = head_channels(options.dim, options.heads, options.dim_head)
    for local_heads in options.local_heads:
        yield _pair(options, _self_attention(options, local_heads), channels, shift=shift)
        if options.attend_axially:
            inner = AxialAttention(_efficient(options.causal), options.local_attn_window_size)
            # dim / heads whatever dim_head is, so that the package's weights fit
            axial = options.dim // options.heads if options.dim % options.heads == 0 else channels
            yield _pair(options, inner, axial)
        if options.receives_context:
            settings = options.context_linformer_settings
            inner = _efficient(False) if settings is None else _linformer(*settings)
            yield _pair(options, inner, channels, context_dim=options.dim)


def _pair(
    options: TransformerOptions,
    inner: InnerAttention,
    channels: int,
    *,
    context_dim: int | None = None,
    shift: tuple[int, ...] | None = None,
) -> Pair:
    attention = MultiheadAttention(
        options.dim,
        options.heads,
        inner,
        head_dim=channels,
        context_dim=context_dim,
        out_bias=True,
        dropout=options.attn_layer_dropout,
        hidden_dropout=options.attn_dropout,
    )
    feed_forward = make_feed_forward(
        options.dim, glu=options.ff_glu, dropout=options.ff_dropout, chunks=options.ff_chunks
    )
    return make_pair(attention, feed_forward, partial(nn.LayerNorm, options.dim), shift)


def _self_attention(options: TransformerOptions, local_heads: int) -> InnerAttention:
    """Return the attention of a layer's heads, local ones first."""
    local: InnerAttention = LocalAttention(options.local_attn_window_size, causal=options.causal, bucketed=True)
    if options.rotary or options.use_rotary_emb:
        local = RotaryAttention(local)
    others: InnerAttention = _efficient(options.causal)
    if options.linformer_settings is not None:
        others = _linformer(options.max_seq_len, options.linformer_settings.k)
    elif options.blindspot_size > 1:
        others = BlindspotAttention(others, options.blindspot_size)
    return split_heads((local_heads, local), (options.heads - local_heads, others))


def _efficient(causal: bool) -> LinearAttention:
    """Return the package's linear attention. The causal one normalises the output, the other one each key feature."""
    normalize = "output" if causal else "keys"
    return LinearAttention(EfficientFeatureMap(), causal=causal, normalize=normalize)


def _linformer(longest: int, projected: int) -> LinformerAttention:
    return LinformerAttention(LearnedProjection(longest, projected), LearnedProjection(longest, projected))
