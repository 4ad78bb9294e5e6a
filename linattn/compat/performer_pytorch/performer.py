"""performer-pytorch's stack of layers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.compat.layers import make_feed_forward, make_stack
from linattn.compat.options import check_options, select
from linattn.compat.performer_pytorch.attention import head_channels, mixed_heads
from linattn.compat.performer_pytorch.fast_attention import FastAttention
from linattn.compat.performer_pytorch.options import ROTARY_RULE, RULES
from linattn.compat.performer_pytorch.projection_updater import ProjectionUpdater
from linattn.nn import Branch, MultiheadAttention, ScaleNorm, TokenShift


@final
class Performer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), `depth` times; with `cross_attend`, each followed by the
    same with attention to a context. Causal ones have `extend`.

    Random features are resampled at the start of a training forward, each sample serving `feature_redraw_interval` of
    them; with `auto_check_redraw=False` the training loop calls `check_redraw_projections` instead."""

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        dim_head: int | None = 64,
        local_attn_heads: int | Sequence[int] = 0,
        local_window_size: int = 256,
        causal: bool = False,
        ff_mult: int = 4,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        reversible: bool = False,
        ff_chunks: int = 1,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        use_scalenorm: bool = False,
        use_rezero: bool = False,
        ff_glu: bool = False,
        ff_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        cross_attend: bool = False,
        no_projection: bool = False,
        auto_check_redraw: bool = True,
        qkv_bias: bool = True,
        attn_out_bias: bool = True,
        shift_tokens: bool = False,
        *,
        ortho_scaling: int = 0,
        rotary_position_emb: bool = False,
        softmax_epsilon: float = 1e-4,
        kernel_epsilon: float = 1e-3,
    ):
        check_options(Performer, (*RULES, ROTARY_RULE), locals())
        super().__init__()
        channels = head_channels(dim, heads, dim_head)
        fast = partial(FastAttention, channels, **select(FastAttention, locals()))
        attention = partial(
            MultiheadAttention,
            dim,
            heads,
            head_dim=channels,
            bias=qkv_bias,
            out_bias=attn_out_bias,
            dropout=attn_dropout,
        )
        feed_forward = partial(make_feed_forward, dim, ff_mult, glu=ff_glu, dropout=ff_dropout, chunks=ff_chunks)
        branch = partial(_branch, dim, scale=use_scalenorm, rezero=use_rezero)
        shifted = partial(branch, shift=((0, 1) if causal else (-1, 0, 1)) if shift_tokens else None)
        pairs = []
        for local_heads in _per_layer(local_attn_heads, depth):
            inner = mixed_heads(
                fast, heads, local_heads, window=local_window_size, causal=causal, rotary=rotary_position_emb
            )
            pairs.append((shifted(attention(inner)), shifted(feed_forward())))
            if cross_attend:
                pairs.append((branch(attention(fast(causal=False), context_dim=dim)), branch(feed_forward())))
        self.net = make_stack(pairs, reversible, "sum")
        self.causal, self.cross_attend, self.auto_check_redraw = causal, cross_attend, auto_check_redraw
        self.proj_updater = ProjectionUpdater(self.net, feature_redraw_interval)

    def check_redraw_projections(self) -> None:
        """Count a training step; after `feature_redraw_interval` of them the random features are resampled."""
        self.proj_updater.redraw_projections()

    def fix_projection_matrices_(self) -> None:
        """Never resample the random features again."""
        self.proj_updater.fix_projections_()

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Apply the layers. `mask` is True where a token is present, `context_mask` where one of the context is."""
        self._check_context(context, context_mask)
        if self.auto_check_redraw:
            self.check_redraw_projections()
        return self.net(x, key_mask=mask, context=context, context_mask=context_mask)

    def extend(
        self,
        x: Float[Tensor, "b n d"],
        state: Any = None,
        mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], Any]:
        """Return what `forward` does, for the next tokens of sequences whose past and context are in `state`."""
        self._check_context(context, context_mask)
        return self.net.extend(x, state, key_mask=mask, context=context, context_mask=context_mask)

    def _check_context(self, context: Tensor | None, context_mask: Tensor | None) -> None:
        if context is not None and not self.cross_attend:
            raise ValueError("a context was given, but nothing attends to it: cross_attend is False")
        if context is None and context_mask is not None:
            raise ValueError("context_mask is of a context, but none was given")


def _branch(dim: int, module: nn.Module, *, scale: bool, rezero: bool, shift: tuple[int, ...] | None = None) -> Branch:
    norm = None if rezero else ScaleNorm(dim) if scale else nn.LayerNorm(dim)
    return Branch(module, norm=norm, shift=None if shift is None else TokenShift(shift), rezero=rezero)


def _per_layer(local_heads: int | Sequence[int], depth: int) -> tuple[int, ...]:
    counts = (local_heads,) * depth if isinstance(local_heads, int) else tuple(local_heads)
    if len(counts) == 1:
        counts = counts * depth
    if len(counts) != depth:
        raise ValueError(f"local_attn_heads needs a number, or one a layer, of {depth}, but is {local_heads}")
    return counts
