"""Lookups beside a model: how many bits would it save to remember every byte of the past exactly?

Each byte is predicted by the model and by the byte that followed the longest match: the longest of the strings before
it that the past has already, at its last place there. The two are mixed, p = (1 − w) p_model + w [the byte is that
one], with a weight w for each length of a match, which is found on other documents than those it is measured on."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

# a match has so many bytes at least, and longer ones than these are alike
SHORTEST, LONGEST = 3, 32


def longest_match(text: bytes, place: int, first: int = 0) -> tuple[int, int]:
    """Return the length of the longest match of the bytes before `place`, in those from `first` on, and the byte that
    followed it there; (0, 0) if there is none."""
    length, after = 0, 0
    for size in range(SHORTEST, min(LONGEST, place - first) + 1):
        if (found := text.rfind(text[place - size : place], first, place - 1)) < 0:
            break
        length, after = size, text[found + size]
    return length, after


def matches(text: bytes, places: Iterable[int], first: int) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Return for the byte at each place the length of its longest match in the bytes from `first` on, and 1 if that
    predicts it."""
    found = [(place, *longest_match(text, place, first)) for place in places]
    hits = [float(length > 0 and after == text[place]) for place, length, after in found]
    return torch.tensor([length for _, length, _ in found]), torch.tensor(hits, dtype=torch.float64)


def mixture_weights(
    own: Float[Tensor, " n"], lengths: Int[Tensor, " n"], hits: Float[Tensor, " n"], *, rounds: int = 50
) -> Float[Tensor, " l"]:
    """Return the weight for each length with which the mixture gives the bytes the highest probability: `own` is the
    model's, and `hits` is 1 where the match predicts the byte. The weights are those of expectation maximisation."""
    weights = torch.full((LONGEST + 1,), 0.5, dtype=own.dtype)
    weights[0] = 0
    counts = torch.zeros_like(weights).index_add_(0, lengths, torch.ones_like(own)).clamp(min=1)
    for _ in range(rounds):
        part = weights[lengths] * hits
        shares = part / (part + (1 - weights[lengths]) * own)
        weights = torch.zeros_like(weights).index_add_(0, lengths, shares) / counts
    return weights


def mixture_bits(
    own: Float[Tensor, " n"], lengths: Int[Tensor, " n"], hits: Float[Tensor, " n"], documents: Int[Tensor, " n"]
) -> float:
    """Return the bits per byte of the mixture: of every other document, with the weights found on the rest."""
    total = torch.zeros((), dtype=own.dtype)
    for odd in (0, 1):
        of_part = documents % 2 == odd
        weight = mixture_weights(own[~of_part], lengths[~of_part], hits[~of_part])[lengths[of_part]]
        total -= (weight * hits[of_part] + (1 - weight) * own[of_part]).log2().sum()
    return float(total / len(own))
