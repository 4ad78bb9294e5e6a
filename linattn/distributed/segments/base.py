"""The functions that all segments share, and the segments of modules that consist of parts."""

from collections.abc import Iterator
from functools import singledispatch
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from linattn.attention.base import InnerAttention
from linattn.attention.checks import check_keys
from linattn.attention.gates import AnyGates, checked_gates
from linattn.attention.split_heads import SplitHeads
from linattn.ops.nested import checked_parts
from linattn.types import KeyMask, Keys, TokenMask, Values

# tokens that are summed at once, so that what is computed of them stays in the cache
PIECE = 512


class Segment(Protocol):
    """The map from the state before some tokens to the state after them. It consists of nested tuples of tensors, as a
    state does, so it can be sent like a state."""

    def after(self, state: Any) -> Any:
        """Return the state after these tokens, from the `state` before them (None: no token was before)."""
        ...


@singledispatch
def segment(
    module: nn.Module, *inputs: Any, key_mask: Tensor | None = None, gates: AnyGates = None, starts: TokenMask = None
) -> Any:
    """Return the `Segment` of the tokens in `inputs`, for a causal attention, a short convolution or a token shift.

    `inputs` and options are those of the module's `extend`, without the queries: for an attention keys and values of
    split heads, with `key_mask` and `gates`; for the others tokens x, with `key_mask` and, for a convolution, `starts`.
    If `state` is the state before the tokens, `segment(…).after(state)` is the state that `extend` returns. Gradients
    flow through all tensors.

    Raises ValueError for inputs that do not fit, and for a module without such a map."""
    kinds = sorted(kind.__name__ for kind in segment.registry if kind is not object)
    raise ValueError(f"{type(module).__name__} has no map of a segment: only {', '.join(kinds)} have one")


class SplitSegment(NamedTuple):
    """The segments of the parts of a module."""

    parts: tuple[Any, ...]

    def after(self, state: tuple[Any, ...] | None) -> tuple[Any, ...]:
        states = checked_parts(state, len(self.parts))
        return tuple(part.after(own) for part, own in zip(self.parts, states, strict=True))


@segment.register
def _split_heads(
    module: SplitHeads, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> SplitSegment:
    own: Any = checked_inputs(module, k, v, key_mask, gates) or (None,) * len(module.heads)
    pieces = zip(module.parts, own, *module.split_keys(k, v, key_mask), strict=True)
    return SplitSegment(tuple(segment(part, k, v, key_mask=mask, gates=gates) for part, gates, k, v, mask in pieces))


def checked_inputs(module: InnerAttention, k: Tensor, v: Tensor, key_mask: Tensor | None, gates: AnyGates) -> Any:
    """Return the gates. Raise ValueError for an attention that is not causal, and for shapes that do not fit."""
    if not module.causal:
        raise ValueError(f"a segment belongs to causal attention, but {type(module).__name__} is not causal here")
    check_keys(k, v, key_mask)
    own = checked_gates(module, gates, k)
    return own[0] if own else None


def pieces(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Cut the tokens, dimension 3, of all tensors into pieces; None stays None."""
    # not slices, each of whose gradients would be as long as the whole
    return zip(*(repeat(None) if x is None else x.split(PIECE, 3) for x in tensors), strict=False)
