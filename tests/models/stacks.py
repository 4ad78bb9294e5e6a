"""Small encoders and decoders of every kind: what the laws of `SequenceModel` are stated over."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linattn.attention.named import named_attention
from linattn.models import EncoderDecoder, SequenceModel
from linattn.nn import (
    AxialPositions,
    Branch,
    FeedForward,
    LearnedPositions,
    MultiheadAttention,
    Projected,
    ResidualSequence,
    ReversibleSequence,
    SinusoidalPositions,
    TokenShift,
)

VOCABULARY, DIM, HEADS, LONGEST = 13, 16, 4, 80

POSITIONS: dict[str, Callable[[], nn.Module] | None] = {
    "none": None,
    "learned": lambda: LearnedPositions(LONGEST, DIM, std=1.0),
    "axial": lambda: AxialPositions(DIM, (10, 8), std=1.0),
    "sinusoidal": lambda: SinusoidalPositions(DIM),
}


def branches(
    attention: str, causal: bool, cross: bool, depth: int, contexts: Sequence[str]
) -> list[tuple[Branch, Branch]]:
    shift = TokenShift((1, 0) if causal else (1, 0, -1))
    made = []
    for layer in range(depth):
        for context in (False, True) if cross else (False,):
            name = contexts[layer % len(contexts)] if context else attention
            heads = {"num_heads": HEADS, "head_dim": DIM // HEADS, "window": 7, "max_length": LONGEST}
            inner = named_attention(name, causal=causal and not context, **heads)
            module = MultiheadAttention(DIM, HEADS, inner, context_dim=DIM if context else None)
            pair = Branch(module, norm=nn.LayerNorm(DIM), shift=None if context else shift), feed_forward()
            made.append(pair)
    return made


def feed_forward() -> Branch:
    return Branch(FeedForward(DIM, 2 * DIM), norm=nn.LayerNorm(DIM))


def model(
    *,
    attention: str = "local+elu",
    causal: bool = True,
    cross: bool = False,
    reversible: bool = False,
    positions: str = "none",
    width: int = DIM,
    head: str | None = "own",
    depth: int = 2,
    contexts: Sequence[str] = ("efficient", "softmax"),
) -> SequenceModel:
    """In float64. `contexts` are the attentions of the layers to the context."""
    embedding, pairs = nn.Embedding(VOCABULARY, width), branches(attention, causal, cross, depth, contexts)
    stack = ReversibleSequence(pairs) if reversible else ResidualSequence(b for pair in pairs for b in pair)
    places = POSITIONS[positions]
    return SequenceModel(
        embedding,
        stack if width == DIM else Projected(stack, width, DIM, out_dim=width),
        positions=None if places is None else places(),
        norm=nn.LayerNorm(width),
        head=nn.Linear(width, VOCABULARY) if head == "own" else None,
        tied=head == "tied",
    ).double()


def encoder_decoder(**options: Any) -> EncoderDecoder:
    return EncoderDecoder(model(causal=False, head=None, **options), model(cross=True, **options))


def some_tokens(b: int, n: int) -> Tensor:
    return torch.randint(VOCABULARY, (b, n))
