"""performer-pytorch's language model."""

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.compat.options import check_options
from linattn.compat.performer_pytorch.options import POSITION_RULES, RULES, has_fast_heads
from linattn.compat.performer_pytorch.performer import Performer
from linattn.models.sequence_model import SequenceModel, SequenceModelState, TiedHead
from linattn.nn import AxialPositions, LearnedPositions, SinusoidalPositions


@final
class PerformerLM(nn.Module):
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
        # without fast heads they are sinusoids alone
        rotary_heads = rotary_position_emb and has_fast_heads(locals())
        super().__init__()
        self.max_seq_len = max_seq_len
        performer = Performer(
            dim,
            depth,
            heads,
            dim_head,
            local_attn_heads,
            local_window_size,
            causal,
            ff_mult,
            nb_features,
            feature_redraw_interval,
            reversible,
            ff_chunks,
            generalized_attention,
            kernel_fn,
            use_scalenorm,
            use_rezero,
            ff_glu,
            ff_dropout,
            attn_dropout,
            cross_attend,
            no_projection,
            auto_check_redraw,
            qkv_bias,
            attn_out_bias,
            shift_tokens,
            ortho_scaling=ortho_scaling,
            rotary_position_emb=rotary_heads,
            softmax_epsilon=softmax_epsilon,
            kernel_epsilon=kernel_epsilon,
        )
        embedding = nn.Embedding(num_tokens, dim)
        self.model = SequenceModel(
            embedding,
            _Stack(performer),
            positions=_positions(dim, max_seq_len, rotary_position_emb, axial_position_emb, axial_position_shape),
            dropout=emb_dropout,
            norm=nn.LayerNorm(dim),
            head=TiedHead(embedding) if tie_embed else nn.Linear(dim, num_tokens),
        )

    @property
    def performer(self) -> Performer:
        assert isinstance(self.model.stack, _Stack)
        return self.model.stack.performer

    def check_redraw_projections(self) -> None:
        """Counts a training step; after `feature_redraw_interval` of them random features are drawn anew."""
        self.performer.check_redraw_projections()

    def fix_projection_matrices_(self) -> None:
        """Random features stay as they are, for good."""
        self.performer.fix_projection_matrices_()

    def forward(
        self,
        x: Int[Tensor, "b n"],
        return_encodings: bool = False,
        mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n o"]:
        """The logits of each token, or what they are made from. `mask` says which tokens are present (True)."""
        if x.shape[1] > self.max_seq_len:
            raise ValueError(f"made for at most {self.max_seq_len} tokens, max_seq_len, but there are {x.shape[1]}")
        encodings = self.model.hidden(x, key_mask=mask, context=context, context_mask=context_mask)
        return encodings if return_encodings else self.model.logits(encodings)

    def begin(
        self, context: Float[Tensor, "b m d"], *, context_mask: Bool[Tensor, "b m"] | None = None
    ) -> SequenceModelState:
        """The state before the first token: the context is summed up here, once and for all."""
        return self.model.begin(context, context_mask=context_mask)

    def extend(
        self,
        x: Int[Tensor, "b n"],
        state: SequenceModelState | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n v"], SequenceModelState]:
        """The logits of the next tokens of sequences whose past is summed up in `state`, which also has the context."""
        return self.model.extend(x, state, key_mask=mask, context=context, context_mask=context_mask)

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
        """The longest sequence that can be generated: sinusoids go on for ever."""
        return self.model.max_length


@final
class _Stack(nn.Module):
    """A Performer as `SequenceModel` calls its stack."""

    def __init__(self, performer: Performer):
        super().__init__()
        self.performer = performer

    def forward(
        self, x: Tensor, *, key_mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None
    ) -> Tensor:
        return self.performer(x, key_mask, context, context_mask)

    def extend(
        self, x: Tensor, state: Any, *, key_mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        return self.performer.extend(x, state, key_mask, context, context_mask)


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
