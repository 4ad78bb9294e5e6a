"""A blindspot: tokens come in blocks, and a query sees only the blocks before its own, as `blindspot_size` has it in
linear-attention-transformer. https://github.com/lucidrains/linear-attention-transformer"""

import math
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.attention.base import InnerAttention, KeysAndValues, checked_ungated
from linattn.attention.linear import LinearAttention, check_sums, group_features
from linattn.checks import check_types
from linattn.ops.features import Features, FeatureState, check_scale, read_features, summarize_features
from linattn.ops.linear import causal_linear_attention
from linattn.ops.nested import check_tokens, map_state
from linattn.ops.numerics import check_exported_length
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState
from linattn.ops.tokens.compaction import join_masks, pack_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class BlindspotState(NamedTuple):
    """The state of the inner attention after the last complete block of `size` tokens, and the tokens after it."""

    inner: FeatureState
    block: KeysAndValues
    size: int


@final
class BlindspotAttention(InnerAttention):
    """Attends as `inner`, a causal `LinearAttention`, but a query does not see its own block. The present tokens of a
    row form blocks of `size` ≥ 2 tokens.

    All queries of a block read the state at its beginning, without further decay; where outputs are normalised, this
    decay would cancel anyway. Memory holds one state per block. Outputs of masked tokens are zeros."""

    causal = True
    state_kind = BlindspotState

    @check_types
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

    def _read(self, q: Tensor, states: FeatureState) -> Tensor:
        """Attend from the queries (b h n d): all queries of a block read the one of the `states` before their block."""
        n, (_, hk, _, blocks, _) = q.shape[-2], states.sums.z.shape
        # all queries before the first complete block read one state
        sizes = blocks, self.size if blocks > 1 else n
        queries = self.inner.feature_map.query(F.pad(q, (0, 0, 0, math.prod(sizes) - n)))
        y = read_features(_cut(group_features(queries, hk), sizes), states, normalize=self.inner.normalize)
        return y.flatten(-3, -2)[..., :n, :].flatten(1, 2)

    def _states(
        self, k: Tensor, v: Tensor, total: Tensor | None, past: FeatureState | None
    ) -> tuple[FeatureState, FeatureState]:
        """Return the states before the first and after each complete block, along a new dimension 3, and the last of
        them alone. The first `total` tokens of each row are present (None: all); `past` is the state before them."""
        sizes = k.shape[-2] // self.size, self.size
        end, key_mask = math.prod(sizes), None
        if total is not None:
            key_mask = torch.arange(end, device=k.device) < (total // self.size * self.size).unsqueeze(-1)
            key_mask = key_mask.unsqueeze(2).unflatten(-1, sizes)
        k, v = k[..., :end, :], v[..., :end, :]
        keys = group_features(self._decayed(self.inner.feature_map.key(k)), k.shape[1])
        if past is not None:
            check_sums(past, keys, v)
            if end == 0:
                return map_state(lambda x: x.unsqueeze(3), past), past
        blocks = summarize_features(_cut(keys, sizes), v.unsqueeze(2).unflatten(-2, sizes), key_mask=key_mask)
        past = _zeros(blocks) if past is None else past
        check_scale(past, None if blocks.log_scale is None else blocks.log_scale.squeeze(-1))
        return _scan(past, blocks, self._decay_per_block(blocks, key_mask))

    def _decayed(self, keys: Features) -> Features:
        """Multiply the features of each key by the decay factor from it to the end of its block."""
        if self.inner.decay is None:
            return keys
        until = self.size - 1 - torch.arange(keys.x.shape[-2], device=keys.x.device) % self.size
        log_scale = (until * self.inner.decay()).expand(keys.x.shape[:-1])
        return keys._replace(log_scale=log_scale if keys.log_scale is None else keys.log_scale + log_scale)

    def _decay_per_block(self, blocks: FeatureState, key_mask: Tensor | None) -> Tensor | None:
        """Return the log decay over each block, after a 0 for the past. It is 0 over incomplete blocks. Return None if
        features have no `log_scale`: with a decay they have one."""
        if blocks.log_scale is None:
            return None
        if self.inner.decay is None:
            return torch.zeros_like(F.pad(blocks.log_scale.squeeze(-1), (1, 0)))
        log_decay = (self.size * self.inner.decay()).unsqueeze(-1)
        complete = blocks.log_scale.new_ones(blocks.log_scale.shape[:-1]) if key_mask is None else key_mask[..., 0]
        return log_decay * F.pad(complete, (1, 0))

    def _check_state(self, state: BlindspotState, k: Tensor, v: Tensor) -> None:
        if state.size != self.size:
            raise ValueError(f"the state was made with a blindspot of {state.size}, but here it is {self.size}")
        check_tokens(state.block.k, state.block.v, k, v, state.block.k.shape[2])


def _cut(features: Features, sizes: tuple[int, int]) -> Features:
    """Cut features (… n f) into blocks (… blocks size f); `sizes` is (blocks, size)."""
    x, log_scale, function = features
    log_scale = None if log_scale is None else log_scale.unflatten(-1, sizes)
    return Features(x.unflatten(-2, sizes), log_scale, function)


def _zeros(blocks: FeatureState) -> FeatureState:
    """Return the state before the first block of a sequence, zeros in the shape of one of the `blocks`."""
    sums = LinearState(*(x.new_zeros(*x.shape[:3], *x.shape[4:]) for x in blocks.sums))
    scale = blocks.log_scale
    return FeatureState(sums, None if scale is None else scale.new_full((*scale.shape[:3], 1), -torch.inf))


def _scan(first: FeatureState, blocks: FeatureState, log_decay: Tensor | None) -> tuple[FeatureState, FeatureState]:
    """Return S_0 = `first` and S_c = exp(log_decay_c) S_{c−1} + `blocks`_c, along dimension 3, and the last of them."""
    scale, last_scale, sums = None, None, blocks.sums
    if blocks.log_scale is not None and first.log_scale is not None:
        sizes = blocks.log_scale.squeeze(-1)
        scale, log_decay, last_scale = running_scale(torch.cat([first.log_scale, sizes], -1), log_decay)
        weight, scale = (sizes - scale[..., 1:]).exp().unsqueeze(-1), scale.unsqueeze(-1)
        sums = LinearState(sums.S * weight.unsqueeze(-1), sums.z * weight)
    sums = LinearState(*(_accumulate(past, new, log_decay) for past, new in zip(first.sums, sums, strict=True)))
    # copies, as views would keep the states of all blocks alive
    last = LinearState(*(x[:, :, :, -1].clone() for x in sums))
    return FeatureState(sums, scale), FeatureState(last, last_scale)


def _accumulate(first: Tensor, new: Tensor, log_decay: Tensor | None) -> Tensor:
    """x_0 = first and x_c = exp(log_decay_c) x_{c−1} + new_c along dimension 3, as attention whose q and k are 1."""
    x = torch.cat([first.unsqueeze(3), new], 3)
    # with as many dimensions as the values, so that decays cannot be taken for those of channels
    one = x.new_ones(1, 1, 1, x.shape[3], 1)
    y, _ = causal_linear_attention(one, one, x.flatten(4), log_decay=log_decay, normalize=None)
    return y.view_as(x)


def _open_block(k: Tensor, v: Tensor, total: Tensor | None, size: int) -> KeysAndValues:
    """Copy the tokens after the last complete block of each row, which has `total` present tokens (None: all). A view
    would keep all of k and v in memory."""
    n = k.shape[-2]
    if total is None:
        end = n // size * size
        return KeysAndValues(k[..., end:, :].clone(), v[..., end:, :].clone(), None)
    total = total.unsqueeze(-1)
    place = total // size * size + torch.arange(min(n, size - 1), device=k.device)
    index = place.clamp(max=n - 1).unsqueeze(-1)
    return KeysAndValues(torch.take_along_dim(k, index, -2), torch.take_along_dim(v, index, -2), place < total)
