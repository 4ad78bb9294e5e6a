"""A blindspot: tokens come in blocks, and a query sees only the blocks before its own, as `blindspot_size` has it in
linear-attention-transformer. https://github.com/lucidrains/linear-attention-transformer"""

from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.attention.base import InnerAttention, KeysAndValues, finite
from linattn.attention.linear import LinearAttention, LinearAttentionState, per_key_head
from linattn.feature_maps.base import Features
from linattn.ops.backends.loopless import check_exported_length
from linattn.ops.compaction import pack_heads
from linattn.ops.linear import causal_linear_attention, read, summarize
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState, check_part
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
        self.inner, self.size = inner, size

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        return self._extend(q, k, v, None, key_mask)[0]

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: BlindspotState | None, key_mask: KeyMask
    ) -> tuple[Outputs, BlindspotState]:
        check_exported_length(k.shape[-2], "BlindspotAttention")
        past, held = None, 0
        if state is not None:
            self._check_state(state, k, v)
            past, block, _ = state
            held, key_mask = block.k.shape[-2], _join_masks(block, k, key_mask)
            k, v = torch.cat([block.k, k], -2), torch.cat([block.v, v], -2)
        if key_mask is None:
            y, past = self._attend_blocks(q, k, v, past, None)
            return y, BlindspotState(past, _last_block(k, v, self.size), self.size)
        # the queries of the open block were answered before
        packed = pack_heads(F.pad(q, (0, 0, held, 0)), k, v, key_mask)
        y, past = self._attend_blocks(packed.q, packed.k, packed.v, past, packed.total)
        block = _last_blocks(packed.k, packed.v, packed.total, self.size)
        return packed.unpack(y)[..., held:, :], BlindspotState(past, block, self.size)

    def _attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, past: LinearAttentionState | None, total: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """Attend from left-packed tokens, `total` per row (None: all). The keys begin with a block; the queries are the
        last of their tokens."""
        inner, n, count = self.inner, q.shape[-2], k.shape[-2] // self.size
        states, last = self._states(k, v, past, count, total)
        queries = inner.per_group(inner.feature_map.query(q), k.shape[1])
        # without a complete block, all queries read one state
        before, width = (k.shape[-2] - n, self.size) if count else (0, n)

        def blocks(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, before, (count + 1) * width - before - n)).unflatten(-2, (count + 1, width))

        log_scale = None if queries.log_scale is None else blocks(queries.log_scale.unsqueeze(-1)).squeeze(-1)
        y = read(blocks(queries.x), states.sums, normalize=inner.normalize, feature_map=queries.function)
        y = inner.rescaled(y, log_scale, states.log_scale).flatten(-3, -2)[..., before : before + n, :]
        return y.flatten(1, 2).to(v.dtype), last

    def _states(
        self, k: Tensor, v: Tensor, past: LinearAttentionState | None, count: int, total: Tensor | None
    ) -> tuple[LinearAttentionState, LinearAttentionState]:
        """Return the states before each of `count` blocks and after the last, (b hk 1 count+1 …); and the last."""
        size, key_mask = self.size, None
        k, v = k[..., : count * size, :], v[..., : count * size, :]
        if total is not None:
            place = torch.arange(count * size, device=k.device)
            key_mask = place < (total // size * size)[..., None, None]
        keys, log_size = per_key_head(self._faded_keys(k), key_mask)
        if past is not None:
            self.inner.check_state(past, keys, v, scaled=log_size is not None)
            if count == 0:
                (S, z), log_scale = past
                log_scale = None if log_scale is None else finite(log_scale).unsqueeze(-1)
                return LinearAttentionState(LinearState(S.unsqueeze(-3), z.unsqueeze(-2)), log_scale), past
        start, scale, log_decay, largest = None, None, None, None
        if log_size is not None:
            tops = log_size.unflatten(-1, (count, size)).amax(-1)
            start = tops.new_full((*tops.shape[:-1], 1), -torch.inf) if past is None else past.log_scale
            scale, log_decay, largest = running_scale(tops, self._decay_per_block(tops, key_mask), start)
        x = keys.relative_to(None if scale is None else scale.repeat_interleave(size, -1))
        sums = summarize(
            x.unflatten(-2, (count, size)),
            v.unsqueeze(2).unflatten(-2, (count, size)),
            key_mask=None if key_mask is None else key_mask.unflatten(-1, (count, size)),
            feature_map=keys.function,
        )
        sums = _accumulate(sums, None if past is None else past.sums, log_decay)
        last = LinearState(sums.S[..., -1, :, :].clone(), sums.z[..., -1, :].clone())
        if start is not None and scale is not None:
            scale = torch.cat([finite(start), scale], -1).unsqueeze(-1)
        return LinearAttentionState(sums, scale), LinearAttentionState(last, largest)

    def _faded_keys(self, k: Tensor) -> Features:
        """Return the features of the keys as they are when their block ends."""
        keys = self.inner.feature_map.key(k)
        if self.inner.decay is not None:
            until = self.size - 1 - torch.arange(k.shape[-2], device=k.device) % self.size
            log_scale = (until * self.inner.decay()).expand(k.shape[:-1])
            keys = keys._replace(log_scale=log_scale if keys.log_scale is None else keys.log_scale + log_scale)
        return keys.scalable()

    def _decay_per_block(self, tops: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return zeros without a decay, and for blocks that are not complete."""
        if self.inner.decay is None:
            return torch.zeros_like(tops)
        log_decay = (self.size * self.inner.decay()).unsqueeze(-1).expand_as(tops)
        return log_decay if key_mask is None else torch.where(key_mask[..., :: self.size], log_decay, 0)

    def _check_state(self, state: BlindspotState, k: Tensor, v: Tensor) -> None:
        if state.size != self.size:
            raise ValueError(f"the state was made with a blindspot of {state.size}, but here it is {self.size}")
        for name, x, new in (("k", state.block.k, k), ("v", state.block.v, v)):
            check_part(name, x, new.dtype, new.shape[1], x.shape[-2], new.shape[3])

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _accumulate(sums: LinearState, start: LinearState | None, log_decay: Tensor | None) -> LinearState:
    """Return start, then S_c = a_c S_{c-1} + ΔS_c for each block, likewise z: sums are values with a feature of one."""

    def as_values(state: LinearState) -> Tensor:
        return torch.cat([state.S, state.z.unsqueeze(-1)], -1).flatten(-2)

    new, width = as_values(sums), sums.S.shape[-1] + 1
    first = new.new_zeros(*new.shape[:-2], 1, new.shape[-1]) if start is None else as_values(start).unsqueeze(-2)
    one, past = new.new_ones(new.shape[-2], 1), LinearState(first, torch.zeros_like(first[..., 0]))
    after, _ = causal_linear_attention(one, one, new, past, log_decay=log_decay, normalize=None)
    states = torch.cat([first, after], -2).unflatten(-1, (-1, width))
    return LinearState(states[..., :-1], states[..., -1])


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
