"""A blindspot: tokens come in blocks, and a query sees only the blocks before its own, as `blindspot_size` has it in
linear-attention-transformer. https://github.com/lucidrains/linear-attention-transformer"""

import math
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.attention.base import InnerAttention, KeysAndValues, checked_ungated, finite, group_mask
from linattn.attention.linear import LinearAttention, LinearAttentionState, per_key_head
from linattn.feature_maps.base import Features
from linattn.ops.linear import causal_linear_attention, read, summarize
from linattn.ops.nested import check_tokens
from linattn.ops.numerics import check_exported_length
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState
from linattn.ops.tokens.compaction import join_masks, pack_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class BlindspotState(NamedTuple):
    """The inner state after the last complete block; the tokens of the open block, fewer than `size`."""

    inner: LinearAttentionState
    block: KeysAndValues
    size: int


@final
class BlindspotAttention(InnerAttention):
    """Hides each query's own block in the causal `LinearAttention` `inner`: each `size` ≥ 2 present tokens of a row are
    a block.

    A query reads the state as it was when its block began, so that decays of its own block do not apply; they would
    cancel wherever outputs are normalised. Memory holds one state per block. Outputs of masked tokens are zeros."""

    causal = True
    state_kind = BlindspotState

    def __init__(self, inner: LinearAttention, size: int):
        super().__init__()
        if not isinstance(inner, LinearAttention) or not inner.causal:
            raise ValueError(f"a blindspot belongs to a causal LinearAttention, but this is {inner!r}")
        if size < 2:
            raise ValueError(f"a blindspot must be a number of tokens, at least 2 to hide any, but is {size}")
        checked_ungated(inner, "BlindspotAttention")
        self.inner, self.size = inner, size

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: BlindspotState | None, key_mask: KeyMask
    ) -> tuple[Outputs, BlindspotState]:
        check_exported_length(k.shape[-2], "BlindspotAttention")
        past, held = None, 0
        if state is not None:
            self._check_state(state, k, v)
            past, block, _ = state
            held, key_mask = block.k.shape[-2], join_masks(block.k, block.key_mask, k, key_mask)
            # the queries of the open block were answered before
            q = F.pad(q, (0, 0, held, 0))
            k, v = torch.cat([block.k, k], -2), torch.cat([block.v, v], -2)
        packed = pack_heads(q, k, v, key_mask)
        states, past = self._states(packed.k, packed.v, packed.total, past)
        y = packed.unpack(self._read(packed.q, states).to(v.dtype))
        block = _open_block(packed.k, packed.v, packed.total, self.size)
        return y[..., held:, :], BlindspotState(past, block, self.size)

    def _read(self, q: Tensor, states: LinearAttentionState) -> Tensor:
        """Attend from the queries of each block to the state before it."""
        inner, n, (sums, scale) = self.inner, q.shape[-2], states
        blocks = sums.z.shape[3]
        # all queries before the first complete block read one state
        cut = (blocks, self.size if blocks > 1 else n)
        q = F.pad(q, (0, 0, 0, math.prod(cut) - n))
        x, log_scale, function = inner.per_group(inner.feature_map.query(q), sums.z.shape[1])
        y = read(x.unflatten(-2, cut), sums, normalize=inner.normalize, feature_map=function)
        y = inner.rescaled(y, None if log_scale is None else log_scale.unflatten(-1, cut), scale)
        return y.flatten(-3, -2)[..., :n, :].flatten(1, 2)

    def _states(
        self, k: Tensor, v: Tensor, total: Tensor | None, past: LinearAttentionState | None
    ) -> tuple[LinearAttentionState, LinearAttentionState]:
        """Return the states before each block and after the last complete one, (b hk 1 blocks …); and the last again.
        The tokens are packed, `total` per row (None: all). The past counts as a block, the first."""
        end = k.shape[-2] // self.size * self.size
        key_mask = None
        if total is not None:
            key_mask = torch.arange(end, device=k.device) < (total // self.size * self.size).unsqueeze(-1)
        key_mask = group_mask(key_mask)
        k, v = k[..., :end, :], v[..., :end, :]
        keys, log_size = per_key_head(self._faded(self.inner.feature_map.key(k)), key_mask)
        if past is not None:
            self.inner.check_state(past, keys, v, scaled=log_size is not None)
            if end == 0:
                scale = None if past.log_scale is None else finite(past.log_scale).unsqueeze(-1)
                return LinearAttentionState(LinearState(*(x.unsqueeze(3) for x in past.sums)), scale), past
        key_scale, scale, log_decay, last_scale = None, None, None, None
        if log_size is not None:
            start = None if past is None else past.log_scale
            start = log_size.new_full((*log_size.shape[:-1], 1), -torch.inf) if start is None else start
            tops = torch.cat([start, self._cut(log_size, -1).amax(-1)], -1)
            scale, log_decay, last_scale = running_scale(tops, self._decay_per_block(tops, key_mask))
            key_scale, scale = scale[..., 1:].repeat_interleave(self.size, -1), scale.unsqueeze(-1)
        sums = summarize(
            self._cut(keys.relative_to(key_scale)),
            self._cut(v.unsqueeze(2)),
            key_mask=None if key_mask is None else self._cut(key_mask, -1),
            feature_map=keys.function,
        )
        sums = LinearState(*(_accumulate(past and past.sums[i], x, log_decay) for i, x in enumerate(sums)))
        # copies, as views would keep the states of all blocks alive
        last = LinearState(*(x[:, :, :, -1].clone() for x in sums))
        return LinearAttentionState(sums, scale), LinearAttentionState(last, last_scale)

    def _faded(self, keys: Features) -> Features:
        """Return the features of the keys as they are when their block ends."""
        if self.inner.decay is not None:
            until = self.size - 1 - torch.arange(keys.x.shape[-2], device=keys.x.device) % self.size
            log_scale = (until * self.inner.decay()).expand(keys.x.shape[:-1])
            keys = keys._replace(log_scale=log_scale if keys.log_scale is None else keys.log_scale + log_scale)
        return keys.scalable()

    def _decay_per_block(self, tops: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return zeros without a decay, and for blocks that are not complete."""
        if self.inner.decay is None:
            return torch.zeros_like(tops)
        log_decay = (self.size * self.inner.decay()).unsqueeze(-1).expand_as(tops)
        return log_decay if key_mask is None else log_decay * F.pad(key_mask[..., :: self.size], (1, 0))

    def _cut(self, x: Tensor, dim: int = -2) -> Tensor:
        return x.unflatten(dim, (x.shape[dim] // self.size, self.size))

    def _check_state(self, state: BlindspotState, k: Tensor, v: Tensor) -> None:
        if state.size != self.size:
            raise ValueError(f"the state was made with a blindspot of {state.size}, but here it is {self.size}")
        check_tokens(state.block.k, state.block.v, k, v, state.block.k.shape[2])


def _accumulate(first: Tensor | None, new: Tensor, log_decay: Tensor | None) -> Tensor:
    """x_0 = first (None: zero) and x_c = a_c x_{c-1} + new_c along dimension 3: sums are values with a feature of 1."""
    first = new.new_zeros(*new.shape[:3], *new.shape[4:]) if first is None else first
    x = torch.cat([first.unsqueeze(3), new], 3)
    # with as many dimensions as the values, so that decays cannot be taken for those of channels
    one = x.new_ones(1, 1, 1, x.shape[3], 1)
    y, _ = causal_linear_attention(one, one, x.flatten(4), log_decay=log_decay, normalize=None)
    return y.view_as(x)


def _open_block(k: Tensor, v: Tensor, total: Tensor | None, size: int) -> KeysAndValues:
    """Copy the tokens behind the complete blocks of left-packed tokens: a view would keep the whole sequence alive."""
    n = k.shape[-2]
    if total is None:
        end = n // size * size
        return KeysAndValues(k[..., end:, :].clone(), v[..., end:, :].clone(), None)
    total = total.unsqueeze(-1)
    place = total // size * size + torch.arange(min(n, size - 1), device=k.device)
    index = place.clamp(max=n - 1).unsqueeze(-1)
    return KeysAndValues(torch.take_along_dim(k, index, -2), torch.take_along_dim(v, index, -2), place < total)
