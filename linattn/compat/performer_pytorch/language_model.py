"""performer-pytorch's language model."""

import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.compat.options import check_options, select
from linattn.compat.performer_pytorch.options import POSITION_RULES, RULES, has_fast_heads
from linattn.compat.performer_pytorch.performer import Performer
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn import AxialPositions, LearnedPositions, SinusoidalPositions


@final
class PerformerLM(TokenModel):
    """Embeddings with positions, a `Performer`, a norm and the logits. If causal, `linattn.generate` takes it.

    Positions are sinusoids, and rotary in every layer (the default); or of a grid, `axial_position_emb`, by default
    64 columns wide; or, with neither, learned. They count present tokens, so padding on the left moves none."""

    def __init__(
        self,
        *,
        num_tokens: int,
        max_seq_len: int,
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
        ff_glu: bool = False,
        emb_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        use_scalenorm: bool = False,
        use_rezero: bool = False,
        cross_attend: bool = False,
        no_projection: bool = False,
        tie_embed: bool = False,
        rotary_position_emb: bool = True,
        axial_position_emb: bool = False,
        axial_position_shape: tuple[int, ...] | None = None,
        auto_check_redraw: bool = True,
        qkv_bias: bool = False,
        attn_out_bias: bool = False,
        shift_tokens: bool = False,
        ortho_scaling: int = 0,
        softmax_epsilon: float = 1e-4,
        kernel_epsilon: float = 1e-3,
    ):
        check_options(PerformerLM, (*RULES, *POSITION_RULES), locals())
        arguments = dict(locals())
        # without fast heads they are sinusoids alone
        arguments["rotary_position_emb"] = rotary_position_emb and has_fast_heads(arguments)
        super().__init__()
        self.max_seq_len, self.causal, self.tied = max_seq_len, causal, tie_embed
        self.embedding = nn.Embedding(num_tokens, dim)
        self.positions = _positions(dim, max_seq_len, rotary_position_emb, axial_position_emb, axial_position_shape)
        self.dropout = nn.Dropout(emb_dropout)
        self.performer = Performer(**select(Performer, arguments))
        self.norm = nn.LayerNorm(dim)
        self.head = None if tie_embed else nn.Linear(dim, num_tokens)

    def get_stack(self) -> nn.Module:
        return self.performer.net

    def check_redraw_projections(self) -> None:
        """Count a training step; after `feature_redraw_interval` of them the random features are resampled."""
        self.performer.check_redraw_projections()

    def fix_projection_matrices_(self) -> None:
        """Never resample the random features again."""
        self.performer.fix_projection_matrices_()

    def forward(
        self,
        x: Int[Tensor, "b n"],
        return_encodings: bool = False,
        mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n o"]:
        """Return the logits of each token, or the vectors before them. `mask` is True where a token is present."""
        if x.shape[1] > self.max_seq_len:
            raise ValueError(f"made for at most {self.max_seq_len} tokens, max_seq_len, but there are {x.shape[1]}")
        if self.performer.auto_check_redraw:
            self.check_redraw_projections()
        encodings = self.hidden(x, key_mask=mask, context=context, context_mask=context_mask)
        return encodings if return_encodings else self.logits(encodings)

    def extend(
        self,
        x: Int[Tensor, "b n"],
        state: TokenModelState | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n v"], TokenModelState]:
        """Return the logits of the next tokens of sequences whose past and context are in `state`, and the new one."""
        y, state = self.extend_hidden(x, state, key_mask=mask, context=context, context_mask=context_mask)
        return self.logits(y), state


def _positions(dim: int, length: int, rotary: bool, axial: bool, shape: tuple[int, ...] | None) -> nn.Module:
    if rotary:
        return SinusoidalPositions(dim)
    if axial:
        shape = (math.ceil(length / 64), 64) if shape is None else tuple(shape)
        if math.prod(shape) < length:
            raise ValueError(f"axial_position_shape {shape} has {math.prod(shape)} places for max_seq_len {length}")
    positions = AxialPositions(dim, shape) if shape is not None else LearnedPositions(length, dim)
    # as large as the embeddings that they are added to
    for weight in positions.parameters():
        nn.init.normal_(weight)
    return positions
