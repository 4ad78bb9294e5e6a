"""Segments of layers whose state consists of tokens: windows, softmax attention, convolutions, shifts, positions."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.attention.base import KeysAndValues
from linattn.attention.gates import AnyGates
from linattn.attention.local import LocalAttention
from linattn.attention.rotary import count_positions
from linattn.attention.softmax import SoftmaxAttention
from linattn.distributed.segments.base import checked_inputs, segment
from linattn.nn.checks import check_mask, check_tokens
from linattn.nn.convolution import Past, ShortConvolution, run_on_present
from linattn.nn.starts import UNKNOWN, ages
from linattn.nn.token_shift import TokenShift
from linattn.ops.numerics import zero_masked
from linattn.ops.softmax.local import LocalState, advance, empty
from linattn.ops.tokens.compaction import compact, join_masks, pack
from linattn.types import KeyMask, Keys, TokenMask, Tokens, Values


class LocalSegment(NamedTuple):
    """The state of a window after these tokens alone."""

    state: LocalState

    def after(self, state: LocalState | None) -> LocalState:
        if state is None:
            return self.state
        k, v, seen = self.state
        return LocalState(_behind(state.k, k, seen), _behind(state.v, v, seen), state.seen + seen)


@segment.register
def _local(
    module: LocalAttention, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> LocalSegment:
    checked_inputs(module, k, v, key_mask, gates)
    total = None
    if key_mask is not None:
        where = compact(key_mask.expand(k.shape[0], -1, -1))
        k, v, total = pack(k, where), pack(v, where), where.total
    return LocalSegment(advance(empty(k, v, module.window), k, v, total))


class SoftmaxSegment(NamedTuple):
    """The keys and values themselves."""

    state: KeysAndValues

    def after(self, state: KeysAndValues | None) -> KeysAndValues:
        if state is None:
            return self.state
        k, v, key_mask = self.state
        mask = join_masks(state.k, state.key_mask, k, key_mask)
        return KeysAndValues(torch.cat([state.k, k], -2), torch.cat([state.v, v], -2), mask)


@segment.register
def _softmax(
    module: SoftmaxAttention, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> SoftmaxSegment:
    checked_inputs(module, k, v, key_mask, gates)
    key_mask = None if key_mask is None else key_mask.expand(k.shape[0], -1, -1)
    return SoftmaxSegment(KeysAndValues(zero_masked(k, key_mask), zero_masked(v, key_mask), key_mask))


class PositionSegment(NamedTuple):
    """The number of present tokens per row or, where `begins` is True, of those since the last sequence began."""

    seen: Int[Tensor, " b"]
    begins: Bool[Tensor, " b"]

    def after(self, state: Int[Tensor, " b"] | None) -> Int[Tensor, " b"]:
        return self.seen if state is None else torch.where(self.begins, self.seen, state + self.seen)


def position_segment(x: Tokens, *, key_mask: TokenMask = None, starts: TokenMask = None) -> PositionSegment:
    """Return the map of the next position, which is the number of present tokens so far. `key_mask` is True for the
    present tokens of x, `starts` for the first token of each sequence, where positions begin again."""
    _, seen = count_positions(x, None, key_mask)
    if starts is None:
        return PositionSegment(seen, torch.zeros_like(seen, dtype=torch.bool))
    _, after = ages(starts, key_mask)
    return PositionSegment(torch.where(after < UNKNOWN, after, seen), after < UNKNOWN)


class InputsSegment(NamedTuple):
    """The last w present inputs, after zeros, and the number `seen` of present tokens. Where a sequence begins, zeros
    stand for the tokens before it, and `seen` is w, so that no input of the past is left."""

    last: Past
    seen: Int[Tensor, " b"]

    def after(self, state: Past | None) -> Past:
        return self.last if state is None else _behind(state, self.last, self.seen)


@segment.register
def _convolution(
    module: ShortConvolution, x: Tokens, *, key_mask: TokenMask = None, starts: TokenMask = None
) -> InputsSegment:
    width = module.weight.shape[0] - 1
    check_tokens(x, module.weight.shape[1], key_mask)
    check_mask(x, starts, starts=True)
    last, (seen, begins) = _last(x, width, key_mask), position_segment(x, key_mask=key_mask, starts=starts)
    distance = torch.arange(width, 0, -1, device=x.device)
    last = torch.where((distance <= seen.unsqueeze(-1)).unsqueeze(-1), last, 0)
    return InputsSegment(last, torch.where(begins, width, seen))


@segment.register
def _token_shift(module: TokenShift, x: Tokens, *, key_mask: TokenMask = None) -> InputsSegment:
    if module.future:
        raise ValueError(f"a segment belongs to a causal module, but offsets {module.offsets} look ahead")
    check_tokens(x, None, key_mask)
    return InputsSegment(_last(x, module.past, key_mask), position_segment(x, key_mask=key_mask).seen)


def _last(x: Tokens, width: int, key_mask: TokenMask) -> Past:
    return run_on_present(lambda past, x: x, x, None, width, key_mask)[1]


def _behind(
    past: Float[Tensor, "*b w d"], last: Float[Tensor, "*b w d"], seen: Int[Tensor, "*#b"]
) -> Float[Tensor, "*b w d"]:
    """Return the last w tokens of `past` and, behind them, the `seen` tokens at the end of `last`."""
    width = last.shape[-2]
    place = (seen.unsqueeze(-1) + torch.arange(width, device=last.device)).unsqueeze(-1)
    return torch.where(place < width, torch.take_along_dim(past, place.clamp(max=max(width - 1, 0)), -2), last)
