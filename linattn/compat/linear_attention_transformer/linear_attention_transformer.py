"""The original's main module. The language model is also its encoder, if it returns embeddings, and its decoder."""

import math
from typing import final

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.compat.linear_attention_transformer.layers import Layers, LinformerContextSettings, LinformerSettings
from linattn.compat.linear_attention_transformer.options import MODEL_RULES
from linattn.compat.linear_attention_transformer.transformer import LinearAttentionTransformer
from linattn.compat.options import check_options, select
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn import AxialPositions, LearnedPositions, Projected, SinusoidalPositions


@final
class LinearAttentionTransformerLM(TokenModel):
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
        layers = Layers(**select(Layers, locals() | {"rotary": use_rotary_emb}))
        super().__init__()
        self.max_seq_len, self.causal, self.tied = max_seq_len, causal, False
        self.receives_context, self.pad_to_multiple = receives_context, layers.pad_to_multiple
        width = dim if emb_dim is None else emb_dim
        out = dim if return_embeddings else width
        self.embedding = nn.Embedding(num_tokens, width)
        if use_rotary_emb:
            self.positions = SinusoidalPositions(width)
        else:
            self.positions = _learned(width, max_seq_len, local_attn_window_size, axial=use_axial_pos_emb is not False)
        self.dropout = nn.Identity()
        stack = layers.stack()
        self.stack = stack if width == dim else Projected(stack, width, dim, out_dim=None if out == dim else out)
        self.norm = nn.LayerNorm(out)
        self.head = None if return_embeddings else nn.Linear(width, num_tokens)

    def get_stack(self) -> nn.Module:
        return self.stack

    def forward(
        self,
        x: Int[Tensor, "b n"],
        input_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n o"]:
        """Return the logits of each token, or its embedding. The masks are True where a token is present."""
        y = self.hidden(x, key_mask=input_mask, context=context, context_mask=context_mask)
        return self.logits(y) if self.gives_logits else y

    def extend(
        self,
        x: Int[Tensor, "b n"],
        state: TokenModelState | None = None,
        input_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n o"], TokenModelState]:
        """Return what `forward` does, for the next tokens of sequences whose past and context are in `state`."""
        y, state = self.extend_hidden(x, state, key_mask=input_mask, context=context, context_mask=context_mask)
        return self.logits(y) if self.gives_logits else y, state


def _learned(width: int, longest: int, window: int, *, axial: bool) -> AxialPositions | LearnedPositions:
    # as large as the embeddings that they are added to
    if not axial:
        return LearnedPositions(longest, width, std=1.0)
    return AxialPositions(width, (math.ceil(longest / window), window), std=1.0)


__all__ = [
    "LinearAttentionTransformer",
    "LinearAttentionTransformerLM",
    "LinformerContextSettings",
    "LinformerSettings",
]
