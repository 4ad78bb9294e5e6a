"""performer-pytorch's attention layers: some heads fast, the others local, between projections."""

from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.attention import InnerAttention, LocalAttention, SplitHeads
from linattn.attention.rotary import RotaryAttention
from linattn.compat.options import check_options, select
from linattn.compat.performer_pytorch.fast_attention import FastAttention
from linattn.compat.performer_pytorch.options import ROTARY_RULE, RULES
from linattn.compat.performer_pytorch.projection_updater import ProjectionUpdater
from linattn.nn import MultiheadAttention

MakeFast = Callable[..., FastAttention]


def mixed_heads(
    fast: MakeFast, heads: int, local_heads: int, *, window: int, causal: bool, rotary: bool
) -> InnerAttention:
    """Return fast heads, then local ones, which have buckets of `window` tokens and always rotary positions."""
    if not 0 <= local_heads <= heads:
        raise ValueError(f"there may be from 0 to {heads} local heads, as many as heads, but there are {local_heads}")
    parts: list[tuple[int, InnerAttention]] = []
    if local_heads < heads:
        inner = fast(causal=causal)
        parts.append((heads - local_heads, RotaryAttention(inner) if rotary else inner))
    if local_heads > 0:
        parts.append((local_heads, RotaryAttention(LocalAttention(window, causal=causal, bucketed=True))))
    return parts[0][1] if len(parts) == 1 else SplitHeads(*parts)


class AttentionBase(nn.Module, ABC):
    """The constructor of the three attentions.

    They resample their random features by themselves, after `feature_redraw_interval` training forwards. Rotary
    positions of the fast heads are an option here, not an argument of `forward`, and count present tokens."""

    crosses: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        causal: bool = False,
        heads: int = 8,
        dim_head: int | None = 64,
        local_heads: int = 0,
        local_window_size: int = 256,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float = 0.0,
        no_projection: bool = False,
        qkv_bias: bool = False,
        attn_out_bias: bool = True,
        *,
        ortho_scaling: int = 0,
        rotary_position_emb: bool = False,
        softmax_epsilon: float = 1e-4,
        kernel_epsilon: float = 1e-3,
    ):
        check_options(AttentionBase, (*RULES, ROTARY_RULE), locals())
        super().__init__()
        self.looks_at_places = local_heads > 0 or rotary_position_emb
        if self.crosses:
            self._check_cross_attention()
        channels = head_channels(dim, heads, dim_head)
        fast = partial(FastAttention, channels, **select(FastAttention, locals()))
        self.attention = MultiheadAttention(
            dim,
            heads,
            mixed_heads(fast, heads, local_heads, window=local_window_size, causal=causal, rotary=rotary_position_emb),
            head_dim=channels,
            context_dim=dim if self.crosses else None,
            bias=qkv_bias,
            out_bias=attn_out_bias,
            dropout=dropout,
        )
        self.proj_updater = ProjectionUpdater(self.attention, feature_redraw_interval)

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
        self,
        x: Float[Tensor, "b n d"],
        context: Float[Tensor, "b m d"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Attend. `mask` is True where a token of x is present, `context_mask` where one of the context is."""
        if context is None:
            if context_mask is not None:
                raise ValueError("context_mask is of a context, but none was given")
            return self._attend(x, None, mask)
        self._check_cross_attention()
        return self._attend(x, context, context_mask)


@final
class SelfAttention(AttentionBase):
    """Tokens attend to each other."""

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n d"]:
        """Attend. `mask` is True where a token is present; the others are as if they were not there."""
        return self._attend(x, None, mask)

    def extend(
        self, x: Float[Tensor, "b n d"], state: Any = None, mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Any]:
        """Return the outputs for the next tokens of sequences whose past is in `state`, and the new state."""
        return self.attention.extend(x, state, key_mask=mask)


@final
class CrossAttention(AttentionBase):
    """Tokens attend to a context."""

    crosses = True

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        context: Float[Tensor, "b m d"],
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Attend. `context_mask` is True where a token of the context is present."""
        return self._attend(x, context, context_mask)


def head_channels(dim: int, heads: int, dim_head: int | None) -> int:
    """Return the channels of a head. None stands for dim / heads."""
    if dim_head is None and dim % heads:
        raise ValueError(f"heads must divide dim where dim_head is None, but they are {heads} and {dim}")
    return dim // heads if dim_head is None else dim_head
