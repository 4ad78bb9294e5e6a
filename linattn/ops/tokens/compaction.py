"""Compaction: present tokens move to the left in their order, and back, so that a masked token is a missing token.

Operations that count tokens (windows, convolutions, projections of the sequence) run on the left-packed tokens, of
which the first `total` are present and the others zeros: they cannot tell padded sequences from unpadded ones."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from linattn.ops.numerics import zero_masked
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class Compaction(NamedTuple):
    """The places of the present tokens per row: `order` lists their positions, then those of the masked tokens; `rank`
    is the number of present tokens up to each position, less one; `total` is the number of present tokens."""

    order: Int[Tensor, "*b n"]
    rank: Int[Tensor, "*b n"]
    total: Int[Tensor, "*b"]


def compact(key_mask: Bool[Tensor, "*b n"], /) -> Compaction:
    """Return the places of tokens whose `key_mask` is True, without a read on the host, which would break graphs."""
    seen, total = key_mask.cumsum(-1), key_mask.sum(-1)
    place = torch.arange(key_mask.shape[-1], device=key_mask.device).expand_as(seen)
    # a scatter of the target places; a sort would take longer, and ONNX has no stable one
    target = torch.where(key_mask, seen - 1, total.unsqueeze(-1) + place - seen)
    return Compaction(torch.zeros_like(seen).scatter(-1, target, place), seen - 1, total)


def pack(x: Shaped[Tensor, "*b n d"], where: Compaction, /) -> Shaped[Tensor, "*b n d"]:
    """Move the present tokens of x to the left, and put zeros behind them instead of the masked tokens."""
    # not take_along_dim, which exports for one length only
    x = x.gather(-2, where.order.unsqueeze(-1).expand_as(x))
    return x.masked_fill(~packed_mask(where).unsqueeze(-1), 0)


def unpack(
    y: Shaped[Tensor, "*b n d"], where: Compaction, key_mask: Bool[Tensor, "*#b n"], /
) -> Shaped[Tensor, "*b n d"]:
    """Move tokens that `pack` packed back to where they were, with zeros where `key_mask` is False."""
    y = y.gather(-2, where.rank.clamp(min=0).unsqueeze(-1).expand_as(y))
    return y.masked_fill(~key_mask.unsqueeze(-1), 0)


def packed_mask(where: Compaction, /) -> Bool[Tensor, "*b n"]:
    """Return the mask of present tokens after `pack`: True for the first `total`."""
    return torch.arange(where.order.shape[-1], device=where.order.device) < where.total.unsqueeze(-1)


def last_tokens(
    past: Float[Tensor, "*b s d"], new: Float[Tensor, "*b n d"], total: Int[Tensor, "*#b"] | None = None, /
) -> Float[Tensor, "*b s d"]:
    """Return the last s tokens of `past`, of length s, followed by the first `total` tokens of `new` (None: all).

    The result is a copy: a view would keep the whole sequence alive in a state of constant size."""
    size, n = past.shape[-2], new.shape[-2]
    if total is None and torch.compiler.is_exporting():
        # comparing n with s would exclude the lengths below s
        return torch.cat([past, new], -2)[..., n:, :].clone()
    if total is None:
        return torch.cat([past[..., n:, :], new[..., max(n - size, 0) :, :]], -2)
    index = total.unsqueeze(-1) + torch.arange(size, device=new.device)
    return torch.take_along_dim(torch.cat([past, new], -2), index.unsqueeze(-1), dim=-2)


def present_heads(q: Queries, k: Keys, v: Values, key_mask: KeyMask, /) -> tuple[Queries, Keys, Values]:
    """Replace masked keys and values by zeros, and in masked queries all NaN and infinities, as their product with zero
    is NaN. A masked query that is finite keeps its output."""
    if key_mask is None:
        return q, k, v
    usable = per_query_head(key_mask, q.shape[1]).unsqueeze(-1) | q.isfinite()
    return torch.where(usable, q, 0), zero_masked(k, key_mask), zero_masked(v, key_mask)


class PackedHeads(NamedTuple):
    """Packed queries, keys and values of split heads: `present` is the mask of the keys, `total` the number of present
    ones, and `queries` hold the queries' places and mask. If all tokens are present, these three are None."""

    q: Queries
    k: Keys
    v: Values
    present: Bool[Tensor, " b #hk n"] | None = None
    total: Int[Tensor, " b #hk"] | None = None
    queries: tuple[Compaction, Bool[Tensor, " b #h n"]] | None = None

    def unpack(self, y: Outputs) -> Outputs:
        """Move the outputs y of packed queries back to where these queries were, with zeros at masked ones."""
        return y if self.queries is None else unpack(y, *self.queries)


def pack_heads(q: Queries, k: Keys, v: Values, key_mask: KeyMask, /) -> PackedHeads:
    """Pack the tokens of self-attention, where a masked key's token is masked as a query too."""
    if key_mask is None:
        return PackedHeads(q, k, v)
    key_mask = key_mask.expand(k.shape[0], -1, -1)
    query_mask = per_query_head(key_mask, q.shape[1])
    where, queries = compact(key_mask), compact(query_mask)
    q, k, v = pack(q, queries), pack(k, where), pack(v, where)
    return PackedHeads(q, k, v, packed_mask(where), where.total, (queries, query_mask))


def per_query_head(x: Shaped[Tensor, "b hk *rest"], num_heads: int, /) -> Shaped[Tensor, "b h *rest"]:
    """Repeat each key head's entry for the query heads that share it, `num_heads` in all. One entry is not repeated."""
    return x if x.shape[1] == 1 else x.repeat_interleave(num_heads // x.shape[1], 1)


def join_masks(
    past: Float[Tensor, "b hk s d"], past_mask: Bool[Tensor, "#b #hk s"] | None, new: Keys, new_mask: KeyMask, /
) -> Bool[Tensor, " b #hk past"] | None:
    """Return the mask of the past keys followed by the new ones, None if all are present."""
    if past_mask is None and new_mask is None:
        return None
    pairs = ((past, past_mask), (new, new_mask))
    masks = [x.new_ones(1, 1, x.shape[-2], dtype=torch.bool) if mask is None else mask for x, mask in pairs]
    heads = max(mask.shape[1] for mask in masks)
    return torch.cat([mask.expand(new.shape[0], heads, -1) for mask in masks], -1)
