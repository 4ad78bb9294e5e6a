"""performer-pytorch's attentions, made of our feature maps. `FastAttention` takes split heads; `Attention` adds
projections, and heads with local attention."""

from abc import ABC
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.attention import InnerAttention, LinearAttention, LocalAttention, RotaryAttention
from linattn.compat.layers import efficient_attention, split_heads
from linattn.compat.options import takes
from linattn.compat.performer_pytorch.floored_favor import FlooredFavorAttention
from linattn.compat.performer_pytorch.options import PerformerOptions
from linattn.compat.performer_pytorch.projection_updater import ProjectionUpdater
from linattn.feature_maps import FavorFeatureMap, GeneralizedFeatureMap, RandomProjection, redraw_features_
from linattn.feature_maps.random_projection import default_num_features
from linattn.nn import MultiheadAttention
from linattn.types import Context, ContextMask, KeyMask, Keys, Outputs, Queries, TokenMask, Tokens, Values

# the base of the angles of all rotary positions
ROTARY = 10_000.0


@final
class FastAttention(nn.Module):
    """Attention by FAVOR+; with `generalized_attention`, by the features kernel_fn(Ω x/d^¼) + kernel_epsilon with
    random rows Ω; with `no_projection`, Efficient Attention.

    `softmax_epsilon` is the floor under FAVOR+'s features (0: no floor), the eps of `softmax_kernel` in
    performer-pytorch. A warning names options without effect, such as `kernel_fn` without `generalized_attention`. The
    attribute `inner` is this attention as an `InnerAttention`, for linattn's own modules."""

    @takes(
        PerformerOptions,
        "dim_heads nb_features ortho_scaling causal generalized_attention kernel_fn no_projection "
        "* softmax_epsilon kernel_epsilon",
    )
    def __init__(self, options: PerformerOptions):
        super().__init__()
        self.dim_heads, self.causal = options.dim_heads, options.causal
        self.inner = _inner_attention(options)

    def forward(self, q: Queries, k: Keys, v: Values, *, key_mask: KeyMask = None) -> Outputs:
        """Attend with split heads. `key_mask` is True where a key is present."""
        return self.inner(q, k, v, key_mask=key_mask)

    def extend(
        self, q: Queries, k: Keys, v: Values, state: Any = None, *, key_mask: KeyMask = None
    ) -> tuple[Outputs, Any]:
        """Return the outputs for the next tokens of sequences whose past is in `state`, and the new state."""
        return self.inner.extend(q, k, v, state, key_mask=key_mask)

    @property
    def projection_matrix(self) -> Float[Tensor, "f d"] | None:
        """The random rows Ω; None if there is no projection."""
        return next((part.rows for part in self.modules() if isinstance(part, RandomProjection)), None)

    @property
    def nb_features(self) -> int:
        return self.dim_heads if self.projection_matrix is None else len(self.projection_matrix)

    def redraw_projection_matrix(self, device: torch.device | str | None = None) -> None:
        """Resample the rows in place. A `device` must be the device of the rows: sampling is on the CPU anyway, so that
        the rows are the same on every device."""
        rows = self.projection_matrix
        if device is not None and rows is not None and torch.device(device).type != rows.device.type:
            raise ValueError(f"the projection matrix is on {rows.device} and cannot be redrawn on {device}")
        redraw_features_(self)


class AttentionBase(nn.Module, ABC):
    """The base of `Attention`, `SelfAttention` and `CrossAttention`, with their constructor.

    They resample their random features by themselves, after `feature_redraw_interval` training forwards. Rotary
    positions of the fast heads are an option here, not an argument of `forward`, and count present tokens."""

    crosses: ClassVar[bool] = False

    @takes(
        PerformerOptions,
        "dim causal heads dim_head local_heads local_window_size nb_features feature_redraw_interval "
        "generalized_attention kernel_fn dropout no_projection qkv_bias attn_out_bias "
        "* ortho_scaling rotary_position_emb softmax_epsilon kernel_epsilon",
        heads=8,
    )
    def __init__(self, options: PerformerOptions):
        super().__init__()
        self.looks_at_places = options.local_heads > 0 or options.rotary_position_emb
        if self.crosses:
            self._check_cross_attention()
        make = cross_attention if self.crosses else partial(self_attention, local_heads=options.local_heads)
        self.attention = make(options, dropout=options.dropout)
        self.proj_updater = ProjectionUpdater(self.attention, options.feature_redraw_interval)

    def _attend(self, x: Tensor, context: Tensor | None, key_mask: Tensor | None) -> Tensor:
        self.proj_updater.redraw_projections()
        return self.attention(x, context, key_mask=key_mask)

    def _check_cross_attention(self) -> None:
        if self.looks_at_places:
            raise ValueError("local heads and rotary positions belong to self attention: a context has other places")


@final
class Attention(AttentionBase):
    """Self attention, or, with a context, cross attention with the same projections."""

    def forward(
        self, x: Tokens, context: Context = None, mask: TokenMask = None, context_mask: ContextMask = None
    ) -> Tokens:
        """Attend. `mask` is True where a token of x is present, `context_mask` where one of the context is."""
        if context is not None:
            self._check_cross_attention()
            return self._attend(x, context, context_mask)
        if context_mask is not None:
            raise ValueError("context_mask is of a context, but none was given")
        return self._attend(x, None, mask)


@final
class SelfAttention(AttentionBase):
    """Tokens attend to each other."""

    def forward(self, x: Tokens, mask: TokenMask = None) -> Tokens:
        """Attend. `mask` is True where a token is present; the others are as if they were not there."""
        return self._attend(x, None, mask)

    def extend(self, x: Tokens, state: Any = None, mask: TokenMask = None) -> tuple[Tokens, Any]:
        """Return the outputs for the next tokens of sequences whose past is in `state`, and the new state."""
        return self.attention.extend(x, state, key_mask=mask)


@final
class CrossAttention(AttentionBase):
    """Tokens attend to a context."""

    crosses = True

    def forward(self, x: Tokens, context: Float[Tensor, "b m c"], context_mask: ContextMask = None) -> Tokens:
        """Attend. `context_mask` is True where a token of the context is present."""
        return self._attend(x, context, context_mask)


def self_attention(options: PerformerOptions, local_heads: int, *, dropout: float) -> MultiheadAttention:
    """Return fast heads, then local heads, which are always rotary and attend by buckets of `local_window_size`."""
    heads = options.heads
    if not 0 <= local_heads <= heads:
        raise ValueError(f"there may be from 0 to {heads} local heads, as many as heads, but there are {local_heads}")
    local = LocalAttention(options.local_window_size, causal=options.causal, bucketed=True)
    if local_heads == heads:
        return _between_projections(options, local, dropout=dropout, rotary=ROTARY)
    fast = _fast_heads(options)
    if options.rotary_position_emb:
        inner = split_heads((heads - local_heads, fast), (local_heads, local))
        return _between_projections(options, inner, dropout=dropout, rotary=ROTARY)
    inner = split_heads((heads - local_heads, fast), (local_heads, RotaryAttention(local, base=ROTARY)))
    return _between_projections(options, inner, dropout=dropout)


def cross_attention(options: PerformerOptions, *, dropout: float) -> MultiheadAttention:
    """Return fast heads that attend to a context."""
    return _between_projections(options, _fast_heads(options), dropout=dropout, context_dim=options.dim)


def _fast_heads(options: PerformerOptions) -> InnerAttention:
    return _inner_attention(replace(options, dim_heads=options.channels))


def _between_projections(
    options: PerformerOptions,
    inner: InnerAttention,
    *,
    dropout: float,
    rotary: float | None = None,
    context_dim: int | None = None,
) -> MultiheadAttention:
    return MultiheadAttention(
        options.dim,
        options.heads,
        inner,
        head_dim=options.channels,
        context_dim=context_dim,
        bias=options.qkv_bias,
        out_bias=options.attn_out_bias,
        rotary=rotary,
        dropout=dropout,
    )


def _inner_attention(options: PerformerOptions) -> InnerAttention:
    dim, causal, scaling = options.dim_heads, options.causal, options.ortho_scaling
    if options.no_projection:
        return efficient_attention(causal)
    if options.generalized_attention:
        count = default_num_features(dim) if options.nb_features is None else options.nb_features
        projection = RandomProjection(dim, count, scaling=scaling)
        feature_map = GeneralizedFeatureMap(options.kernel_fn, epsilon=options.kernel_epsilon, projection=projection)
        return LinearAttention(feature_map, causal=causal)
    favor = FavorFeatureMap(dim, options.nb_features, scaling=scaling)
    if options.softmax_epsilon == 0:
        return LinearAttention(favor, causal=causal)
    return FlooredFavorAttention(favor, epsilon=options.softmax_epsilon, causal=causal)
