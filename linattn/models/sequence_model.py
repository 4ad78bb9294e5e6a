"""A model of sequences by composition: embedding, positions, a stack of branches, a norm and a head, each given."""

from typing import Any, NamedTuple, cast, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.attention.base import InnerAttention
from linattn.attention.checks import for_batch
from linattn.models.language_model import look_up
from linattn.nn.attention import count_positions
from linattn.nn.checks import check_indices
from linattn.ops.compaction import compact, pack, unpack
from linattn.ops.state import check_part, checked_kind


class SequenceModelState(NamedTuple):
    """The past of a batch of sequences: the stack's, and the number of tokens where there are positions."""

    stack: Any
    position: Int[Tensor, " b"] | None


@final
class SequenceModel(nn.Module):
    """head(norm(stack(embedding(tokens) + positions))): an encoder or a decoder, with a context or without.

    The stack is a `ResidualSequence`, a `ReversibleSequence`, or one of them `Projected`; without a head the outputs
    are embeddings. A masked token (`key_mask` False, anywhere) counts as if it were not there; its own output means
    nothing. If the stack is causal, the model can `extend` and be given to `linattn.generate`."""

    def __init__(
        self,
        embedding: nn.Embedding,
        stack: nn.Module,
        *,
        positions: nn.Module | None = None,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
    ):
        super().__init__()
        self.embedding, self.positions, self.stack = embedding, positions, stack
        self.dropout, self.norm, self.head = nn.Dropout(dropout), norm, head
        self.causal = is_causal(stack)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def vocab_size(self) -> int:
        return self.embedding.num_embeddings

    @property
    def max_length(self) -> int | None:
        return None if self.positions is None else cast(int | None, self.positions.max_length)

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n o"]:
        """Logits, or embeddings if there is no head."""
        x = self.hidden(tokens, key_mask=key_mask, context=context, context_mask=context_mask)
        return x if self.head is None else self.head(x)

    def hidden(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """What the head takes."""
        x, _ = self._embed(tokens, None, key_mask)
        return self._norm(run_stack(self.stack, self.causal, x, key_mask, context, context_mask))

    def begin(
        self, context: Float[Tensor, "b m c"], *, context_mask: Bool[Tensor, "b m"] | None = None
    ) -> SequenceModelState:
        """The state before the first token: the context is summed up here, once and for all, and not needed again."""
        none = torch.zeros(len(context), 0, dtype=torch.long, device=context.device)
        return self.extend_hidden(none, context=context, context_mask=context_mask)[1]

    def extend(
        self,
        tokens: Int[Tensor, "b n"],
        state: SequenceModelState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n o"], SequenceModelState]:
        """The same as `forward` for the next tokens, any number of them, of sequences whose past is summed up in
        `state`; a context is needed only where there is none."""
        x, state = self.extend_hidden(tokens, state, key_mask=key_mask, context=context, context_mask=context_mask)
        return x if self.head is None else self.head(x), state

    def extend_hidden(
        self,
        tokens: Int[Tensor, "b n"],
        state: SequenceModelState | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], SequenceModelState]:
        """What the head takes, for the next tokens."""
        if state is not None:
            state = for_batch(checked_kind(state, SequenceModelState), tokens.shape[0])
            check_part("position", state.position, None if self.positions is None else torch.int64)
        x, position = self._embed(tokens, state and state.position, key_mask)
        call = {"key_mask": key_mask, "context": context, "context_mask": context_mask}
        x, stack = cast(Any, self.stack).extend(x, state and state.stack, **call)
        return self._norm(x), SequenceModelState(stack, position)

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        if self.head is None:
            raise ValueError("this model has no head: it gives embeddings, no logits")
        return self.head(x)

    def _embed(self, tokens: Tensor, position: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        check_indices(tokens, key_mask)
        n, longest = tokens.shape[1], self.max_length
        if longest is not None and key_mask is None and n > longest:
            raise ValueError(f"the model's positions end at {longest}, but there are {n} tokens")
        if key_mask is not None:
            # a masked place may hold anything, so also what is no token
            tokens = tokens.masked_fill(~key_mask, 0)
        x = look_up(self.embedding, tokens, "tokens")
        if self.positions is not None:
            places, position = count_positions(x, position, key_mask)
            x = x + self.positions(places).to(x.dtype)
        return self.dropout(x), position

    def _norm(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


@final
class TiedHead(nn.Module):
    """logits = E x with the embedding's own matrix E, which stays a weight of the embedding alone."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        # in a tuple, so that it is no part of this module
        self._tied = (embedding,)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return F.linear(x, self._tied[0].weight)


def is_causal(stack: nn.Module) -> bool:
    """Whether tokens see only those before them: some attention is causal (cross attention never is)."""
    return any(module.causal for module in stack.modules() if isinstance(module, InnerAttention))


def run_stack(
    stack: nn.Module,
    causal: bool,
    x: Float[Tensor, "b n d"],
    key_mask: Bool[Tensor, "b n"] | None,
    context: Float[Tensor, "b m c"] | None,
    context_mask: Bool[Tensor, "b m"] | None,
) -> Float[Tensor, "b n o"]:
    """Padding on the right is future: with the present tokens on the left, no causal layer needs a mask."""
    call = {"context": context, "context_mask": context_mask}
    if key_mask is None or not causal:
        return stack(x, key_mask=key_mask, **call)
    where = compact(key_mask)
    return unpack(stack(pack(x, where), key_mask=None, **call), where, key_mask)
