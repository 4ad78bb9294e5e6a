"""The options of linear-attention-transformer's constructors, and which of them have no effect beside others."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from linattn.checks import check_sizes
from linattn.compat.layers import LayerOptions
from linattn.compat.options import REQUIRED, Idle


class LinformerSettings(NamedTuple):
    """Global heads attend to `k` projected tokens."""

    k: int


class LinformerContextSettings(NamedTuple):
    """Attention to a context of at most `seq_len` tokens, projected to `k`."""

    seq_len: int
    k: int


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(LayerOptions):
    """The package's options, and one more: `rotary` gives the local heads of a `LinearAttentionTransformer` rotary
    positions, as `use_rotary_emb` gives them to those of a language model."""

    attn_layer_dropout: float = 0.0
    attn_dropout: float = 0.0
    blindspot_size: int = 1
    n_local_attn_heads: int | tuple[int, ...] = 0
    local_attn_window_size: int = 128
    receives_context: bool = False
    attend_axially: bool = False
    # or the original package's tuples
    linformer_settings: LinformerSettings | tuple[int] | None = None
    context_linformer_settings: LinformerContextSettings | tuple[int, int] | None = None
    rotary: bool = False
    # tokens
    emb_dim: int | None = None
    return_embeddings: bool = False
    use_axial_pos_emb: bool | None = None
    use_rotary_emb: bool = False

    @property
    def local_counts(self) -> tuple[int, ...]:
        """The number of local heads of each layer."""
        heads = self.n_local_attn_heads
        return (heads,) * self.depth if isinstance(heads, int) else tuple(heads)

    @property
    def has_window(self) -> bool:
        """True if some attention is made with `local_attn_window_size`."""
        return any(self.local_counts) or self.attend_axially

    @property
    def pad_to_multiple(self) -> int:
        """The number whose multiples `Autopadder` pads to, as the original needs."""
        return math.lcm(self.blindspot_size, self.local_attn_window_size if self.has_window else 1)

    def without_effect(self) -> Idle:
        if all(count == self.heads for count in self.local_counts):
            yield ("blindspot_size", "linformer_settings"), "where all heads are local"
        if not self.receives_context:
            yield ("context_linformer_settings",), "where receives_context is False"
        if not any(self.local_counts):
            yield ("rotary",), "without local heads"
        if self.use_rotary_emb:
            yield ("use_axial_pos_emb",), "with use_rotary_emb, whose positions are sinusoids"
        has_axial_positions = self.num_tokens is not REQUIRED and self.use_axial_pos_emb is not False
        if not self.has_window and (self.use_rotary_emb or not has_axial_positions):
            reason = "without local heads, without attend_axially and without axial positions"
            yield ("local_attn_window_size",), reason

    def check(self) -> None:
        """Raise ValueError for options that are out of range or exclude each other."""
        size, window, counts = self.blindspot_size, self.local_attn_window_size, self.local_counts
        _check_settings("linformer_settings", self.linformer_settings, LinformerSettings)
        _check_settings("context_linformer_settings", self.context_linformer_settings, LinformerContextSettings)
        if self.linformer_settings is not None and self.causal:
            raise ValueError(
                "Linformer mixes the whole sequence into every key, so linformer_settings need causal=False"
            )
        if len(counts) != self.depth:
            raise ValueError(f"n_local_attn_heads has a number for {len(counts)} layers, but depth is {self.depth}")
        if not all(0 <= count <= self.heads for count in counts):
            raise ValueError(f"n_local_attn_heads must be from 0 to heads, {self.heads}, but is {counts}")
        if size > 1 and not self.causal:
            raise ValueError(f"a blindspot hides the recent past, so blindspot_size {size} needs causal=True")
        if size > 1 and not (any(counts) and window >= size):
            raise ValueError(
                f"with blindspot_size {size} only local heads see a token's own block of {size}: give "
                f"n_local_attn_heads, and a local_attn_window_size of at least {size}, "
                f"but they are {counts} and {window}"
            )


def _check_settings(name: str, settings: object, kind: type[LinformerSettings | LinformerContextSettings]) -> None:
    """Raise ValueError unless the settings are None or sizes, as many as the fields of their `kind`."""
    if settings is None:
        return
    if not isinstance(settings, tuple) or len(settings) != len(kind._fields):
        raise ValueError(f"{name} must be {kind.__name__}({', '.join(kind._fields)}), but is {settings!r}")
    sizes: dict[str, Any] = {name: settings}
    check_sizes(**sizes)
