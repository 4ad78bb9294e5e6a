"""performer-pytorch's stack of layers, and its language model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, final

from jaxtyping import Float
from torch import Tensor, nn

from linattn.compat.layers import Pair, make_pair, make_stack
from linattn.compat.options import takes
from linattn.compat.performer_pytorch.attention import cross_attention, self_attention
from linattn.compat.performer_pytorch.options import PerformerOptions
from linattn.compat.performer_pytorch.projection_updater import ProjectionUpdater, Redrawing
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn import AxialPositions, LearnedPositions, ScaleNorm, SinusoidalPositions
from linattn.nn.branch import Call
from linattn.nn.checks import check_indices
from linattn.types import Context, ContextMask, TokenIds, TokenMask, Tokens

# the arguments of both constructors, and those that the package does not have, or only for parts
_LAYERS = (
    "dim_head local_attn_heads local_window_size causal ff_mult nb_features feature_redraw_interval reversible "
    "ff_chunks generalized_attention kernel_fn use_scalenorm use_rezero ff_glu ff_dropout attn_dropout cross_attend "
    "no_projection auto_check_redraw qkv_bias attn_out_bias shift_tokens"
)
_ADDITIONS = "ortho_scaling rotary_position_emb softmax_epsilon kernel_epsilon"


@final
class Performer(Redrawing):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), `depth` times. With `cross_attend`, a second such pair
    follows each, with attention to a context. Causal models have `extend`.

    Random features are resampled at the start of a training forward, each sample serving `feature_redraw_interval` of
    them; with `auto_check_redraw=False` the training loop calls `check_redraw_projections` instead."""

    @takes(PerformerOptions, f"dim depth heads {_LAYERS} * {_ADDITIONS}", qkv_bias=True)
    def __init__(self, options: PerformerOptions):
        super().__init__()
        self.net = make_stack(options, _pairs(options), "sum")
        self.causal, self.cross_attend = options.causal, options.cross_attend
        self.auto_check_redraw = options.auto_check_redraw
        self.proj_updater = ProjectionUpdater(self.net, options.feature_redraw_interval)

    def forward(
        self, x: Tokens, mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Tokens:
        """Apply the layers. `mask` is True where a token is present, `context_mask` where one of the context is."""
        call = Call(mask, context, context_mask).checked(self.cross_attend, "cross_attend is False")
        if self.auto_check_redraw:
            self.proj_updater.redraw_projections()
        return call(self.net, x)

    def extend(
        self,
        x: Tokens,
        state: Any = None,
        mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Tokens, Any]:
        """Return the outputs for the next tokens after those of `state`, and the new state. A context is given in the
        first call, with `state` None; then the state holds it."""
        call = Call(mask, context, context_mask).checked(self.cross_attend, "cross_attend is False")
        return self.net.extend(x, state, **call._asdict())


@final
class PerformerLM(TokenModel, Redrawing):
    """Embeddings with positions, a `Performer`, a norm and the logits. If causal, `linattn.generate` takes it.

    With `rotary_position_emb` (the default) sinusoids are added, and every layer has rotary positions. Without it
    positions are learned, with `axial_position_emb` those of a grid, by default 64 columns wide. Positions count
    present tokens, so padding on the left moves none."""

    @takes(
        PerformerOptions,
        f"* num_tokens max_seq_len dim depth heads {_LAYERS} emb_dropout tie_embed axial_position_emb "
        f"axial_position_shape {_ADDITIONS}",
        attn_out_bias=False,
        rotary_position_emb=True,
    )
    def __init__(self, options: PerformerOptions):
        super().__init__()
        self.max_seq_len, self.causal, self.tied = options.max_seq_len, options.causal, options.tie_embed
        self.embedding = nn.Embedding(options.num_tokens, options.dim)
        self.positions = _positions(options)
        self.dropout = nn.Dropout(options.emb_dropout)
        # without fast heads the rotary positions are the sinusoids alone
        rotary = options.rotary_position_emb and options.has_fast_heads
        self.performer = Performer(replace(options, rotary_position_emb=rotary))
        self.norm = nn.LayerNorm(options.dim)
        self.head = None if self.tied else nn.Linear(options.dim, options.num_tokens)

    def get_stack(self) -> nn.Module:
        return self.performer.net

    def forward(
        self,
        x: TokenIds,
        return_encodings: bool = False,
        mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> Float[Tensor, "b n o"]:
        """Return the logits of each token, or the vectors before them. `mask` is True where a token is present."""
        check_indices(x, mask)
        if x.shape[1] > self.max_seq_len:
            raise ValueError(f"made for at most {self.max_seq_len} tokens, max_seq_len, but there are {x.shape[1]}")
        if self.performer.auto_check_redraw:
            self.performer.proj_updater.redraw_projections()
        encodings = self.hidden(x, key_mask=mask, context=context, context_mask=context_mask)
        return encodings if return_encodings else self.logits(encodings)

    def extend(
        self,
        x: TokenIds,
        state: TokenModelState | None = None,
        mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Float[Tensor, "b n v"], TokenModelState]:
        """Return the logits of the next tokens after those of `state`, and the new state. A context is given in the
        first call, with `state` None; then the state holds it."""
        y, state = self.extend_hidden(x, state, key_mask=mask, context=context, context_mask=context_mask)
        return self.logits(y), state


def _pairs(options: PerformerOptions) -> Iterator[Pair]:
    """Yield self attention and attention to the context of each layer, each with a feed-forward."""
    shift = None
    if options.shift_tokens:
        shift = (0, 1) if options.causal else (-1, 0, 1)
    norm = ScaleNorm if options.use_scalenorm else nn.LayerNorm
    pair = partial(make_pair, options, norm=None if options.use_rezero else norm, rezero=options.use_rezero)
    counts, depth = options.local_counts, options.depth
    if len(counts) not in (1, depth):
        raise ValueError(f"local_attn_heads needs a number, or one a layer, of {depth}, but is {counts}")
    for local in counts if len(counts) == depth else counts * depth:
        yield pair(self_attention(options, local, dropout=options.attn_dropout), shift=shift)
        if options.cross_attend:
            yield pair(cross_attention(replace(options, causal=False), dropout=options.attn_dropout))


def _positions(options: PerformerOptions) -> SinusoidalPositions | AxialPositions | LearnedPositions:
    """Return positions of the options' kind. Learned tables, one or one per axis, begin as an nn.Embedding does."""
    dim, length, shape = options.dim, options.max_seq_len, options.axial_position_shape
    if options.rotary_position_emb:
        return SinusoidalPositions(dim)
    if not options.axial_position_emb:
        return LearnedPositions(length, dim, std=1.0)
    shape = (math.ceil(length / 64), 64) if shape is None else tuple(shape)
    if math.prod(shape) < length:
        raise ValueError(f"axial_position_shape {shape} has {math.prod(shape)} places for max_seq_len {length}")
    # each axis is as large, not their sum
    return AxialPositions(dim, shape, max_length=length, std=math.sqrt(len(shape)))
