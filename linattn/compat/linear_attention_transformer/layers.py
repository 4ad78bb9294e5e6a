"""The layers of a `LinearAttentionTransformer`, built from the package's arguments."""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import nn

from linattn.attention.axial import AxialAttention
from linattn.attention.base import InnerAttention
from linattn.attention.blindspot import BlindspotAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.linformer import LearnedProjection, LinformerAttention
from linattn.attention.local import LocalAttention
from linattn.attention.rotary import RotaryAttention
from linattn.attention.split_heads import SplitHeads
from linattn.compat.layers import make_feed_forward, make_stack
from linattn.feature_maps import EfficientFeatureMap
from linattn.nn import Branch, MultiheadAttention, ResidualSequence, ReversibleSequence, TokenShift


class LinformerSettings(NamedTuple):
    """Global heads attend to `k` projected tokens."""

    k: int


class LinformerContextSettings(NamedTuple):
    """Attention to a context of at most `seq_len` tokens, projected to `k`."""

    seq_len: int
    k: int


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The arguments that make a stack, under the package's names."""

    dim: int
    depth: int
    max_seq_len: int
    heads: int
    dim_head: int | None
    causal: bool
    reversible: bool
    ff_chunks: int
    ff_glu: bool
    ff_dropout: float
    attn_layer_dropout: float
    attn_dropout: float
    blindspot_size: int
    n_local_attn_heads: int | tuple[int, ...]
    local_attn_window_size: int
    receives_context: bool
    attend_axially: bool
    linformer_settings: LinformerSettings | None
    context_linformer_settings: LinformerContextSettings | None
    shift_tokens: bool
    rotary: bool = False

    def __post_init__(self) -> None:
        _check_linformer(self)
        _check_local_heads(self)
        _check_blindspot(self)

    @property
    def local_heads(self) -> tuple[int, ...]:
        """The number of local heads of each layer."""
        heads = self.n_local_attn_heads
        return (heads,) * self.depth if isinstance(heads, int) else tuple(heads)

    @property
    def channels(self) -> int:
        """The channels of a head."""
        if self.dim_head is not None:
            return self.dim_head
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim, or dim_head be given, but they are {self.heads} and {self.dim}")
        return self.dim // self.heads

    @property
    def pad_to_multiple(self) -> int:
        """The number whose multiples `Autopadder` pads to, as the original needs."""
        window = self.local_attn_window_size if any(self.local_heads) or self.attend_axially else 1
        return math.lcm(self.blindspot_size, window)

    def stack(self) -> ResidualSequence | ReversibleSequence:
        """Return the layers, each with a feed-forward: self attention, axial attention, attention to the context."""
        feed_forward = partial(
            make_feed_forward, self.dim, glu=self.ff_glu, dropout=self.ff_dropout, chunks=self.ff_chunks
        )
        pairs = []
        for local_heads in self.local_heads:
            pairs.append((self._shifted(self._self_attention(local_heads)), self._shifted(feed_forward())))
            if self.attend_axially:
                pairs.append((self._branch(self._axial_attention()), self._branch(feed_forward())))
            if self.receives_context:
                pairs.append((self._branch(self._cross_attention()), self._branch(feed_forward())))
        return make_stack(pairs, self.reversible, "mean")

    def _branch(self, module: nn.Module, shift: TokenShift | None = None) -> Branch:
        return Branch(module, norm=nn.LayerNorm(self.dim), shift=shift)

    def _shifted(self, module: nn.Module) -> Branch:
        offsets = (1, 0) if self.causal else (1, 0, -1)
        return self._branch(module, TokenShift(offsets) if self.shift_tokens else None)

    def _attention(self, inner: InnerAttention, channels: int, *, context: bool = False) -> MultiheadAttention:
        return MultiheadAttention(
            self.dim,
            self.heads,
            inner,
            head_dim=channels,
            context_dim=self.dim if context else None,
            out_bias=True,
            dropout=self.attn_layer_dropout,
            hidden_dropout=self.attn_dropout,
        )

    def _self_attention(self, local_heads: int) -> MultiheadAttention:
        """Return the self attention of a layer, whose local heads come first."""
        parts = [(local_heads, self._local()), (self.heads - local_heads, self._global())]
        parts = [(count, part) for count, part in parts if count]
        return self._attention(parts[0][1] if len(parts) == 1 else SplitHeads(*parts), self.channels)

    def _local(self) -> InnerAttention:
        local = LocalAttention(self.local_attn_window_size, causal=self.causal, bucketed=True)
        return RotaryAttention(local) if self.rotary else local

    def _global(self) -> InnerAttention:
        if self.linformer_settings is not None:
            return _linformer(self.max_seq_len, self.linformer_settings.k)
        linear = _efficient(self.causal)
        return linear if self.blindspot_size == 1 else BlindspotAttention(linear, self.blindspot_size)

    def _axial_attention(self) -> MultiheadAttention:
        # dim / heads whatever dim_head is, so that the package's weights fit
        channels = self.dim // self.heads if self.dim % self.heads == 0 else self.channels
        return self._attention(AxialAttention(_efficient(self.causal), self.local_attn_window_size), channels)

    def _cross_attention(self) -> MultiheadAttention:
        settings = self.context_linformer_settings
        inner = _efficient(False) if settings is None else _linformer(*settings)
        return self._attention(inner, self.channels, context=True)


def _efficient(causal: bool) -> LinearAttention:
    """Return the package's linear attention. The causal one normalises the output, the other one each key feature."""
    normalize = "output" if causal else "keys"
    return LinearAttention(EfficientFeatureMap(), causal=causal, normalize=normalize)


def _linformer(longest: int, projected: int) -> LinformerAttention:
    return LinformerAttention(LearnedProjection(longest, projected), LearnedProjection(longest, projected))


def _check_linformer(layers: Layers) -> None:
    if layers.linformer_settings is not None and layers.causal:
        raise ValueError("Linformer mixes the whole sequence into every key, so linformer_settings need causal=False")


def _check_local_heads(layers: Layers) -> None:
    heads = layers.local_heads
    if len(heads) != layers.depth:
        raise ValueError(f"n_local_attn_heads has a number for {len(heads)} layers, but depth is {layers.depth}")
    if not all(0 <= count <= layers.heads for count in heads):
        raise ValueError(f"n_local_attn_heads must be from 0 to heads, {layers.heads}, but is {heads}")


def _check_blindspot(layers: Layers) -> None:
    size, window = layers.blindspot_size, layers.local_attn_window_size
    if size < 1:
        raise ValueError(f"blindspot_size must be a number of tokens, at least 1, but is {size}")
    if size == 1:
        return
    if not layers.causal:
        raise ValueError(f"a blindspot hides the recent past, so blindspot_size {size} needs causal=True")
    if not any(layers.local_heads) or window < size:
        raise ValueError(
            f"with blindspot_size {size} only local heads see a token's own block of {size}: give n_local_attn_heads, "
            f"and a local_attn_window_size of at least {size}, but they are {layers.local_heads} and {window}"
        )
