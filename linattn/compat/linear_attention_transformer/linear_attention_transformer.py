"""The original's main module. The language model is also its encoder, if it returns embeddings, and its decoder."""

import math
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.compat.linear_attention_transformer.layers import Layers, LinformerContextSettings, LinformerSettings
from linattn.compat.linear_attention_transformer.options import MODEL_RULES
from linattn.compat.linear_attention_transformer.transformer import LinearAttentionTransformer, check_context
from linattn.compat.options import check_options
from linattn.models.sequence_model import SequenceModel, SequenceModelState
from linattn.nn import AxialPositions, LearnedPositions, Projected, SinusoidalPositions


@final
class LinearAttentionTransformerLM(nn.Module):
    """Embeddings with positions, a `LinearAttentionTransformer`, a norm and the logits (`return_embeddings` leaves them
    out). If causal, `linattn.generate` takes it.

    Positions are those of a grid, `local_attn_window_size` wide (the default), or, with `use_axial_pos_emb=False`,
    learned, one for each of `max_seq_len`; or, with `use_rotary_emb`, sinusoids, of any length, and rotary in the local
    heads. They count present tokens, so padding on the left moves none."""

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        depth: int,
        max_seq_len: int,
        heads: int = 8,
        dim_head: int | None = 64,
        causal: bool = False,
        emb_dim: int | None = None,
        reversible: bool = False,
        ff_chunks: int = 1,
        ff_glu: bool = False,
        ff_dropout: float = 0.0,
        attn_layer_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        blindspot_size: int = 1,
        n_local_attn_heads: int | tuple[int, ...] = 0,
        local_attn_window_size: int = 128,
        return_embeddings: bool = False,
        receives_context: bool = False,
        *,
        attend_axially: bool = False,
        linformer_settings: LinformerSettings | None = None,
        context_linformer_settings: LinformerContextSettings | None = None,
        use_axial_pos_emb: bool | None = None,
        use_rotary_emb: bool = False,
        shift_tokens: bool = False,
    ):
        check_options(LinearAttentionTransformerLM, MODEL_RULES, locals())
        super().__init__()
        self.max_seq_len = max_seq_len
        layers = Layers(
            dim=dim,
            depth=depth,
            max_seq_len=max_seq_len,
            heads=heads,
            dim_head=dim_head,
            causal=causal,
            ff_chunks=ff_chunks,
            ff_glu=ff_glu,
            ff_dropout=ff_dropout,
            attn_layer_dropout=attn_layer_dropout,
            attn_dropout=attn_dropout,
            reversible=reversible,
            blindspot_size=blindspot_size,
            n_local_attn_heads=n_local_attn_heads,
            local_attn_window_size=local_attn_window_size,
            receives_context=receives_context,
            attend_axially=attend_axially,
            linformer_settings=linformer_settings,
            context_linformer_settings=context_linformer_settings,
            shift_tokens=shift_tokens,
            rotary=use_rotary_emb,
        )
        width = dim if emb_dim is None else emb_dim
        out = dim if return_embeddings else width
        grid = (math.ceil(max_seq_len / local_attn_window_size), local_attn_window_size)
        self.receives_context, self.pad_to_multiple = receives_context, layers.pad_to_multiple
        stack = layers.stack()
        self.model = SequenceModel(
            nn.Embedding(num_tokens, width),
            stack if width == dim else Projected(stack, width, dim, out_dim=_other(out, dim)),
            positions=SinusoidalPositions(width)
            if use_rotary_emb
            else _learned(width, max_seq_len, None if use_axial_pos_emb is False else grid),
            norm=nn.LayerNorm(out),
            head=None if return_embeddings else nn.Linear(width, num_tokens),
        )

    def forward(
        self,
        x: Int[Tensor, "b n"],
        input_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n o"]:
        """The logits of each token, or its embedding. The masks say which tokens are present (True)."""
        check_context(self.receives_context, context, context_mask)
        return self.model(x, key_mask=input_mask, context=context, context_mask=context_mask)

    def begin(
        self, context: Float[Tensor, "b m d"], *, context_mask: Bool[Tensor, "b m"] | None = None
    ) -> SequenceModelState:
        """The state before the first token: the context is summed up here, once and for all."""
        check_context(self.receives_context, context, context_mask)
        return self.model.begin(context, context_mask=context_mask)

    def extend(
        self,
        x: Int[Tensor, "b n"],
        state: SequenceModelState | None = None,
        input_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n o"], SequenceModelState]:
        """The same for the next tokens of sequences whose past is summed up in `state`, which also has the context."""
        check_context(self.receives_context, context, context_mask)
        return self.model.extend(x, state, key_mask=input_mask, context=context, context_mask=context_mask)

    def extend_hidden(
        self, tokens: Int[Tensor, "b n"], state: Any = None, *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Any]:
        """What `logits` takes, for the next tokens."""
        return self.model.extend_hidden(tokens, state, key_mask=key_mask)

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return self.model.logits(x)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_length(self) -> int | None:
        """The longest sequence that there are positions for; sinusoids go on for ever."""
        return self.model.max_length


def _other(out: int, dim: int) -> int | None:
    return None if out == dim else out


def _learned(width: int, longest: int, grid: tuple[int, ...] | None) -> AxialPositions | LearnedPositions:
    # as large as the embeddings that they are added to
    return LearnedPositions(longest, width, std=1.0) if grid is None else AxialPositions(width, grid, std=1.0)


__all__ = [
    "LinearAttentionTransformer",
    "LinearAttentionTransformerLM",
    "LinformerContextSettings",
    "LinformerSettings",
]
