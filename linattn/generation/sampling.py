"""The draw of the next token from the logits of a model."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.checks import check_fields, check_sizes

Logits = Float[Tensor, "b v"]
# True for the tokens that a row has
Seen = Bool[Tensor, "b v"]
LEAST_TEMPERATURE = 1e-30
"""Logits up to 10⁸ divided by it are finite in float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The way to draw the next token from the logits: first the penalty, then temperature, top_k, top_p and filter.

    `temperature` divides the logits; 0 takes the most likely token. `top_k` keeps the k most likely, `top_p` the fewest
    that reach probability p together, `min_p` those with at least p times the probability of the most likely one
    (these three need a temperature above 0), `filter` is any function of logits to logits, at any temperature.
    `repetition_penalty` concerns the tokens that were there before, in the prompt too: it divides positive logits and
    multiplies negative ones, so 1 does nothing (Keskar et al., https://arxiv.org/abs/1909.05858)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    filter: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            wanted = f"0, for the most likely token, or finite and at least {LEAST_TEMPERATURE}"
            raise ValueError(f"temperature must be {wanted}, but is {self.temperature}")
        if self.top_k is not None:
            check_sizes(top_k=self.top_k)
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"{name} must be in (0, 1], but is {share}")
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (None, None, None):
            raise ValueError(
                "top_k, top_p and min_p choose what is drawn from: with temperature 0, the default, nothing is"
            )
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be positive and finite, but is {self.repetition_penalty}")


GREEDY = Sampling()


def draw(logits: Logits, sampling: Sampling, seen: Seen, generator: torch.Generator | None = None) -> Int[Tensor, " b"]:
    """Draw the next token of each row; `seen` is True for the tokens that are penalised."""
    if sampling.temperature == 0:
        return most_likely(logits, sampling, seen)
    return torch.multinomial(probabilities(logits, sampling, seen), 1, generator=generator).squeeze(1)


def most_likely(logits: Logits, sampling: Sampling, seen: Seen) -> Int[Tensor, " b"]:
    logits = penalised(logits.float(), seen, sampling.repetition_penalty)
    return _drawable(logits, sampling).argmax(-1)


def probabilities(logits: Logits, sampling: Sampling, seen: Seen) -> Logits:
    """Return the distributions that tokens are drawn from; the temperature must not be 0."""
    logits = penalised(logits.float(), seen, sampling.repetition_penalty) / sampling.temperature
    if sampling.top_k is not None:
        logits = k_largest(logits, min(sampling.top_k, logits.shape[-1]))
    if sampling.top_p is not None:
        logits = nucleus(logits, sampling.top_p)
    if sampling.min_p is not None:
        least = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    return _drawable(logits, sampling).softmax(-1)


def _drawable(logits: Logits, sampling: Sampling) -> Logits:
    """Return the logits that the filter leaves. Raise ValueError if there is no token to draw."""
    if sampling.filter is not None:
        shape, logits = logits.shape, sampling.filter(logits)
        is_tensor = isinstance(logits, Tensor)
        if not is_tensor or logits.shape != shape or not logits.is_floating_point():
            came = f"{tuple(logits.shape)} of {logits.dtype}" if is_tensor else f"a {type(logits).__name__}"
            raise ValueError(f"the filter must return logits {tuple(shape)}, as it gets them, but returned {came}")
    if not logits.amax(-1).isfinite().all():
        origin = "model" if sampling.filter is None else "model, or the filter,"
        raise ValueError(f"the logits of the {origin} hold NaN or +∞, or −∞ for every token: nothing can be drawn")
    return logits


def penalised(logits: Logits, seen: Seen, penalty: float) -> Logits:
    """Make the tokens that were seen less likely, the more the larger the penalty; 1 changes nothing."""
    if penalty == 1:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def k_largest(logits: Logits, k: int) -> Logits:
    """Remove all but k of the most likely tokens; of tokens that are equally likely, some are kept."""
    values, places = logits.topk(k)
    return torch.full_like(logits, -math.inf).scatter_(-1, places, values)


def nucleus(logits: Logits, top_p: float) -> Logits:
    """Remove as many of the least likely tokens as have a probability of at most 1 − `top_p` together."""
    ascending, order = logits.sort(dim=-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[:, -1] = False
    return logits.masked_fill(torch.zeros_like(removed).scatter_(1, order, removed), -math.inf)
