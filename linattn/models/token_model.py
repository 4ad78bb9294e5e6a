"""Models of tokens: embeddings with positions, a stack of layers, a norm and the logits. `TokenModel` is their base
class; `SequenceModel` is composed of modules that the caller passes."""

from abc import ABC
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from linattn.attention.base import InnerAttention
from linattn.attention.rotary import count_positions
from linattn.checks import check_instances, check_types, given
from linattn.nn import MultiheadAttention, TokenShift
from linattn.nn.branch import Call
from linattn.nn.checks import check_indices, out_of_range
from linattn.ops.nested import check_part, checked_kind, for_batch
from linattn.ops.tokens.compaction import compact, pack, unpack
from linattn.types import Context, ContextMask, TokenIds, TokenMask, Tokens


class TokenModelState(NamedTuple):
    """The past of a batch of sequences: `stack` is the layers' state, `position` the number of present tokens per row
    if the model has positions, else None."""

    stack: Any
    position: Int[Tensor, " b"] | None


class TokenModel(nn.Module, ABC):
    """head(norm(stack(embedding(tokens) + positions))). Subclasses define `forward` and `extend`.

    If `tied`, the logits are E x with the embedding's own matrix E; a model that is neither tied nor has a head gives
    no logits. A masked token (`key_mask` False, anywhere) counts as if it were not there; its own output means nothing.
    If the stack is `causal`, `linattn.generate` takes the model. `extend` needs the context only without a state."""

    embedding: nn.Embedding
    positions: nn.Module | None
    stack: Any
    dropout: nn.Module
    norm: nn.Module
    head: nn.Module | None
    tied: bool
    causal: bool
    tokenizer_file: Path | None = None
    """A file of the tokenizers package, for generation from text."""

    def get_stack(self) -> Any:
        """Return the layers, which have the `forward` and `extend` of a `ResidualSequence`."""
        return self.stack

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def vocab_size(self) -> int:
        return self.embedding.num_embeddings

    @property
    def max_length(self) -> int | None:
        """The length of the longest sequence that there are positions for, None if there is no limit."""
        return None if self.positions is None else cast(int | None, self.positions.max_length)

    @property
    def gives_logits(self) -> bool:
        return self.tied or self.head is not None

    def hidden(
        self, tokens: TokenIds, *, key_mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Tokens:
        """Return the vectors that `logits` takes."""
        x, _ = self.embed(tokens, key_mask=key_mask)
        return self.norm(run_stack(self.get_stack(), self.causal, x, Call(key_mask, context, context_mask)))

    def begin(self, context: Float[Tensor, "b m c"], *, context_mask: ContextMask = None) -> TokenModelState:
        """Return the state before the first token. It sums up the context, which is not needed again."""
        none = torch.zeros(len(context), 0, dtype=torch.long, device=context.device)
        return self.extend_hidden(none, context=context, context_mask=context_mask)[1]

    def extend_hidden(
        self,
        tokens: TokenIds,
        state: TokenModelState | None = None,
        *,
        key_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Tokens, TokenModelState]:
        """Return the vectors of `hidden` for the next tokens of sequences, whose past is `state`, and the new state."""
        if state is not None:
            check_indices(tokens, key_mask)
            state = for_batch(checked_kind(state, TokenModelState), tokens.shape[0])
            check_part("position", state.position, None if self.positions is None else torch.int64)
        x, position = self.embed(tokens, state and state.position, key_mask=key_mask)
        call = {"key_mask": key_mask, "context": context, "context_mask": context_mask}
        x, stack = self.get_stack().extend(x, state and state.stack, **call)
        return self.norm(x), TokenModelState(stack, position)

    def embed(
        self, tokens: TokenIds, position: Int[Tensor, " b"] | None = None, *, key_mask: TokenMask = None
    ) -> tuple[Tokens, Int[Tensor, " b"] | None]:
        """Return the stack's input for tokens from `position` (None: 0) on, and the position after the last one."""
        check_indices(tokens, key_mask)
        n, longest = tokens.shape[1], self.max_length
        if longest is not None and key_mask is None and n > longest:
            raise ValueError(f"the model's positions end at {longest}, but there are {n} tokens")
        if key_mask is not None:
            # a masked place may hold anything, also a number that is no token
            tokens = tokens.masked_fill(~key_mask, 0)
        try:
            x = self.embedding(tokens)
        except IndexError as error:
            raise out_of_range("tokens", tokens, self.vocab_size) from error
        if self.positions is not None:
            places, position = count_positions(x, position, key_mask)
            x = x + self.positions(places).to(x.dtype)
        return self.dropout(x), position

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        if self.tied:
            return F.linear(x, self.embedding.weight)
        if self.head is None:
            raise ValueError("this model has no head: it gives embeddings, no logits")
        return self.head(x)


@final
class SequenceModel(TokenModel):
    """head(norm(stack(embedding(tokens) + positions))): an encoder or a decoder, with a context or without.

    The `stack` is a `ResidualSequence`, a `ReversibleSequence`, or one of them `Projected`; `positions` one of
    `LearnedPositions`, `SinusoidalPositions` and `AxialPositions`; `norm` and `head` modules that act on each token
    alone, such as an nn.RMSNorm and an nn.Linear. `dropout` is the probability of dropping inputs of the stack in
    training. `tied` makes the matrix of the `embedding` the head; with neither, the outputs are embeddings. A masked
    token (`key_mask` False) is a missing token. If the stack is causal, `linattn.generate` takes the model."""

    @check_types
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
        check_instances(nn.Embedding, embedding=embedding)
        check_instances(nn.Module, stack=stack, **given(positions=positions, norm=norm, head=head))
        if tied and head is not None:
            raise ValueError("a tied model has the embedding's matrix for its head, but another head was given")
        self.embedding, self.positions, self.stack = embedding, positions, stack
        self.dropout, self.norm = nn.Dropout(dropout), nn.Identity() if norm is None else norm
        self.head, self.tied = head, tied
        self.causal = any(part.causal for part in stack.modules() if isinstance(part, InnerAttention))
        if self.causal and any(map(_looks_ahead, stack.modules())):
            raise ValueError(
                "some attention is causal, so no layer may look ahead: neither another self attention nor a token shift"
            )

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
        """Return what `forward` returns, for the next tokens of sequences whose past is in `state`, and the new state.
        A context is needed only where there is no state."""
        x, state = self.extend_hidden(tokens, state, key_mask=key_mask, context=context, context_mask=context_mask)
        return self.logits(x) if self.gives_logits else x, state


def _looks_ahead(part: nn.Module) -> bool:
    if isinstance(part, TokenShift):
        return part.future > 0
    return isinstance(part, MultiheadAttention) and not (part.inner.causal or part.is_cross_attention)


def run_stack(stack: Any, causal: bool, x: Tokens, call: Call) -> Float[Tensor, "b n o"]:
    """Apply the stack to x with the arguments in `call`. If it is causal, first move the present tokens to the left: no
    present token sees the missing ones behind it, so that no layer needs a mask."""
    if call.key_mask is None or not causal or not stack.packs:
        return stack(x, **call._asdict())
    where = compact(call.key_mask)
    return unpack(call._replace(key_mask=None)(stack, pack(x, where)), where, call.key_mask)
