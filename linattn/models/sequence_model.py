"""A model of sequences by composition: embedding, positions, a stack of branches, a norm and a head, each given."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from linattn.attention.base import InnerAttention
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.types import Context, ContextMask, TokenIds, TokenMask


@final
class SequenceModel(TokenModel):
    """head(norm(stack(embedding(tokens) + positions))): an encoder or a decoder, with a context or without.

    The `stack` is a `ResidualSequence`, a `ReversibleSequence`, or one of them `Projected`; `positions` one of
    `LearnedPositions`, `SinusoidalPositions` and `AxialPositions`; `norm` and `head` modules that act on each token
    alone, such as an nn.RMSNorm and an nn.Linear. `dropout` is the probability of dropping inputs of the stack in
    training. `tied` makes the matrix of the `embedding` the head; with neither, the outputs are embeddings.

    A masked token (`key_mask` False, anywhere) counts as if it were not there; its own output means nothing. If the
    stack is causal, `linattn.generate` takes the model."""

    def __init__(
        self,
        embedding: nn.Embedding,
        stack: nn.Module,
        *,
        positions: nn.Module | None = None,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
        tied: bool = False,
    ):
        super().__init__()
        if tied and head is not None:
            raise ValueError("a tied model has the embedding's matrix for its head, but another head was given")
        self.embedding, self.positions, self.stack = embedding, positions, stack
        self.dropout, self.norm = nn.Dropout(dropout), nn.Identity() if norm is None else norm
        self.head, self.tied = head, tied
        self.causal = any(part.causal for part in stack.modules() if isinstance(part, InnerAttention))

    def forward(
        self, tokens: TokenIds, *, key_mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Float[Tensor, "b n o"]:
        """Return the logits, or embeddings if there is no head."""
        x = self.hidden(tokens, key_mask=key_mask, context=context, context_mask=context_mask)
        return self.logits(x) if self.gives_logits else x

    def extend(
        self,
        tokens: TokenIds,
        state: TokenModelState | None = None,
        *,
        key_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Float[Tensor, "b n o"], TokenModelState]:
        """Return what `forward` does, for the next tokens of sequences whose past is in `state`, and the new state.

        A context is needed only where there is no state."""
        x, state = self.extend_hidden(tokens, state, key_mask=key_mask, context=context, context_mask=context_mask)
        return self.logits(x) if self.gives_logits else x, state
