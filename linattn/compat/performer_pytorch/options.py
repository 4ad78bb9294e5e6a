"""The options of performer-pytorch's constructors, and which of them have no effect beside others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.compat.layers import LayerOptions
from linattn.compat.options import REQUIRED, Idle

_KERNEL = ("kernel_fn", "kernel_epsilon")
_SAMPLED = ("nb_features", "ortho_scaling", "feature_redraw_interval", "auto_check_redraw")
_FEATURES = (*_SAMPLED, *_KERNEL, "softmax_epsilon", "generalized_attention")


@dataclass(frozen=True, kw_only=True)
class PerformerOptions(LayerOptions):
    """The package's options. `local_attn_heads` is the number of local heads in the layers of a stack, `local_heads`
    the number in an attention alone."""

    heads: int = REQUIRED
    dim_head: int | None = 64
    dim_heads: int = REQUIRED
    cross_attend: bool = False
    local_heads: int = 0
    local_attn_heads: int | Sequence[int] = 0
    local_window_size: int = 256
    qkv_bias: bool = False
    attn_out_bias: bool = True
    dropout: float = 0.0
    attn_dropout: float = 0.0
    # features
    nb_features: int | None = None
    ortho_scaling: int = 0
    feature_redraw_interval: int | None = 1000
    auto_check_redraw: bool = True
    generalized_attention: bool = False
    kernel_fn: Callable[[Tensor], Tensor] = torch.relu
    kernel_epsilon: float = 1e-3
    softmax_epsilon: float = 1e-4
    no_projection: bool = False
    # layers
    use_scalenorm: bool = False
    use_rezero: bool = False
    # tokens
    emb_dropout: float = 0.0
    tie_embed: bool = False
    rotary_position_emb: bool = False
    axial_position_emb: bool = False
    axial_position_shape: tuple[int, ...] | None = None

    @property
    def local_counts(self) -> tuple[int, ...]:
        """The numbers of local heads: one for all layers, or one per layer."""
        counts = self.local_heads if self.local_attn_heads == 0 else self.local_attn_heads
        return (counts,) if isinstance(counts, int) else tuple(counts)

    @property
    def has_fast_heads(self) -> bool:
        """True if some head of self attention attends to more than its window."""
        return any(count != self.heads for count in self.local_counts)

    def without_effect(self) -> Idle:
        if not self.has_fast_heads and not self.cross_attend:
            yield (*_FEATURES, "no_projection"), "where all heads are local"
        if self.no_projection:
            yield _FEATURES, "with no_projection, whose features are a softmax and an exponential"
        if self.generalized_attention:
            yield ("softmax_epsilon",), "with generalized_attention, whose epsilon is kernel_epsilon"
        else:
            yield _KERNEL, "without generalized_attention"
        if self.feature_redraw_interval is None:
            yield ("auto_check_redraw",), "where feature_redraw_interval is None, as nothing is redrawn"
        if not any(self.local_counts):
            yield ("local_window_size",), "without local heads"
        if self.use_scalenorm:
            yield ("use_rezero",), "with use_scalenorm"
        # in a language model they are sinusoids too
        if not self.has_fast_heads and self.num_tokens is REQUIRED:
            yield ("rotary_position_emb",), "where all heads are local, which have rotary positions anyway"
        if self.rotary_position_emb:
            yield ("axial_position_emb",), "without rotary_position_emb=False, which is not the default"
        if self.rotary_position_emb or not self.axial_position_emb:
            yield ("axial_position_shape",), "where axial_position_emb is False"
