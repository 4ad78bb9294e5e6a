"""A blindspot: tokens come in blocks, and a query sees only the blocks before its own, as `blindspot_size` has it in
linear-attention-transformer. https://github.com/lucidrains/linear-attention-transformer"""

from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.attention.base import InnerAttention, KeysAndValues
from linattn.attention.checks import checked_heads
from linattn.attention.linear import LinearAttention, LinearAttentionState
from linattn.ops.backends.loopless import check_exported_length
from linattn.ops.compaction import pack_heads
from linattn.ops.state import check_part
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class BlindspotState(NamedTuple):
    """The inner state after the last complete block; the tokens of the open block, fewer than `size`."""

    inner: LinearAttentionState
    block: KeysAndValues
    size: int


@final
class BlindspotAttention(InnerAttention):
    """Causal linear attention that hides each query's own block: each `size` present tokens of a row are a block.

    A complete block enters the inner attention twice: first its queries read, with its keys masked, then its keys are
    added. A query reads the state as it was when its block began, so that decays of its own block do not apply; they
    would cancel wherever outputs are normalised. Outputs of masked tokens are zeros."""

    causal = True

    def __init__(self, inner: LinearAttention, size: int):
        super().__init__()
        if not isinstance(inner, LinearAttention) or not inner.causal:
            raise ValueError(f"a blindspot belongs to a causal LinearAttention, but this is {inner!r}")
        if size < 2:
            raise ValueError(f"a blindspot must be a number of tokens, at least 2 to hide any, but is {size}")
        self.inner, self.size = inner, size

    def forward(self, q: Queries, k: Keys, v: Values, *, key_mask: KeyMask = None) -> Outputs:
        return self.extend(q, k, v, key_mask=key_mask)[0]

    def extend(
        self, q: Queries, k: Keys, v: Values, state: BlindspotState | None = None, *, key_mask: KeyMask = None
    ) -> tuple[Outputs, BlindspotState]:
        q, k, v, state = checked_heads(q, k, v, key_mask, state, kind=BlindspotState, causal=True)
        check_exported_length(k.shape[-2], "BlindspotAttention")
        past, held = None, 0
        if state is not None:
            self._check_state(state, k, v)
            past, block, _ = state
            held, key_mask = block.k.shape[-2], _join_masks(block, k, key_mask)
            # the block's queries were answered before
            q = torch.cat([q.new_zeros(*q.shape[:2], held, q.shape[3]), q], -2)
            k, v = torch.cat([block.k, k], -2), torch.cat([block.v, v], -2)
        if key_mask is None:
            y, past = self._attend(q, k, v, past, torch.full((1, 1), k.shape[-2], device=k.device), held)
            return y[..., held:, :], BlindspotState(past, _last_block(k, v, self.size), self.size)
        packed = pack_heads(q, k, v, key_mask)
        y, past = self._attend(packed.q, packed.k, packed.v, past, packed.total, 0)
        block = _last_blocks(packed.k, packed.v, packed.total, self.size)
        return packed.unpack(y)[..., held:, :], BlindspotState(past, block, self.size)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, past: LinearAttentionState | None, total: Tensor, skipped: int
    ) -> tuple[Tensor, LinearAttentionState]:
        """Attend from left-packed tokens, `total` per row, that begin with a block; outputs of `skipped` are zeros."""
        q, k, v = (_twice(x, self.size)[..., skipped:, :] for x in (q, k, v))
        place = torch.arange(skipped, skipped + k.shape[-2], device=k.device)
        added = place % (2 * self.size) >= self.size
        complete = place // (2 * self.size) < (total // self.size).unsqueeze(-1)
        y, state = self.inner.extend(q, k, v, past, key_mask=added & complete)
        return _first_of_each_two(F.pad(y, (0, 0, skipped, 0)), self.size), state

    def _check_state(self, state: BlindspotState, k: Tensor, v: Tensor) -> None:
        if state.size != self.size:
            raise ValueError(f"the state was made with a blindspot of {state.size}, but here it is {self.size}")
        for name, x, new in (("k", state.block.k, k), ("v", state.block.v, v)):
            check_part(name, x, new.dtype, new.shape[1], x.shape[-2], new.shape[3])

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _twice(x: Tensor, size: int) -> Tensor:
    """Repeat each complete block of x (… n d); the tokens behind them stand once."""
    end = x.shape[-2] // size * size
    blocks = x[..., :end, :].unflatten(-2, (-1, size))
    return torch.cat([torch.stack([blocks, blocks], -3).flatten(-4, -2), x[..., end:, :]], -2)


def _first_of_each_two(x: Tensor, size: int) -> Tensor:
    """Undo `_twice`."""
    end = x.shape[-2] // (2 * size) * (2 * size)
    blocks = x[..., :end, :].unflatten(-2, (-1, 2, size))
    return torch.cat([blocks.select(-3, 0).flatten(-3, -2), x[..., end:, :]], -2)


def _last_block(k: Tensor, v: Tensor, size: int) -> KeysAndValues:
    """Copy the tokens behind the complete blocks: a view would keep the whole sequence alive."""
    end = k.shape[-2] // size * size
    return KeysAndValues(k[..., end:, :].clone(), v[..., end:, :].clone(), None)


def _last_blocks(k: Tensor, v: Tensor, total: Tensor, size: int) -> KeysAndValues:
    """Do as `_last_block` where only the first `total` tokens of a row are present."""
    n, total = k.shape[-2], total.unsqueeze(-1)
    place = total // size * size + torch.arange(min(n, size - 1), device=k.device)
    index = place.clamp(max=n - 1).unsqueeze(-1)
    return KeysAndValues(torch.take_along_dim(k, index, -2), torch.take_along_dim(v, index, -2), place < total)


def _join_masks(block: KeysAndValues, k: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """Return the mask of the open block's tokens and the next ones; None if all are present."""
    if block.key_mask is None and key_mask is None:
        return None
    pairs = ((block.k, block.key_mask), (k, key_mask))
    masks = [x.new_ones(1, 1, x.shape[-2], dtype=torch.bool) if mask is None else mask for x, mask in pairs]
    heads = max(mask.shape[1] for mask in masks)
    return torch.cat([mask.expand(k.shape[0], heads, -1) for mask in masks], -1)
