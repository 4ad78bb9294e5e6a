"""The facts about each attention of `ATTENTIONS`, which `traits` finds by building it with small sizes."""

from functools import cache
from typing import NamedTuple

from linattn.attention.base import InnerAttention
from linattn.attention.named import names_in, untrained_attention
from linattn.checks import check_types


class Traits(NamedTuple):
    """Facts about an attention, each True or False.

    `causal` attention can be built so that a query sees the keys up to its own, `bidirectional` so that it sees all
    keys; `cross` attention can read the keys of other tokens, such as those of a context. A `learned` attention has
    weights to train. A `gated` one needs gates, which a module computes from its input. One of `fixed_length` is built
    for sequences of up to `max_length` tokens."""

    causal: bool
    bidirectional: bool
    cross: bool
    learned: bool
    gated: bool
    fixed_length: bool


@check_types
def traits(spec: str) -> Traits:
    """Return what an attention or a mixture can do, and what it needs. `spec` names it, as in `named_attention`.

    A mixture can only do what all its parts can, and needs what any of them needs. Torch's random numbers stay as
    they were."""
    parts = [_traits(name) for name in names_in(spec)]
    return Traits(
        causal=all(part.causal for part in parts),
        bidirectional=all(part.bidirectional for part in parts),
        cross=all(part.cross for part in parts),
        learned=any(part.learned for part in parts),
        gated=any(part.gated for part in parts),
        fixed_length=any(part.fixed_length for part in parts),
    )


@cache
def _traits(name: str) -> Traits:
    causal, bidirectional = (_small(name, causal, max_length=2) for causal in (True, False))
    inner = bidirectional or causal
    assert inner is not None, f"{name} can be built neither causal nor bidirectional"
    return Traits(
        causal=causal is not None,
        bidirectional=bidirectional is not None,
        cross=bidirectional is not None and not bidirectional.same_tokens,
        learned=any(True for _ in inner.parameters()),
        gated=inner.needs is not None,
        fixed_length=_small(name, inner.causal, max_length=None) is None,
    )


def _small(name: str, causal: bool, max_length: int | None) -> InnerAttention | None:
    """Build the attention for one head of two channels; return None if that raises ValueError for these arguments."""
    try:
        return untrained_attention(name, num_heads=1, head_dim=2, causal=causal, max_length=max_length)
    except ValueError:
        return None
