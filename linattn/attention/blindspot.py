"""A blindspot: tokens come in blocks, and a query sees only the blocks before its own, as `blindspot_size` has it in
linear-attention-transformer. https://github.com/lucidrains/linear-attention-transformer"""

from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.attention.base import InnerAttention, KeysAndValues
from linattn.attention.checks import checked_heads
from linattn.attention.linear import LinearAttention, LinearAttentionState, per_key_head
from linattn.feature_maps.base import Features
from linattn.ops.backends.loopless import check_exported_length
from linattn.ops.compaction import join_masks, pack_heads
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
    """Causal linear attention that hides each query's own block: each `size` present tokens of a row are a block.

    A query reads the state as it was when its block began, so that decays of its own block do not apply; they would
    cancel wherever outputs are normalised. Memory holds one state per block. Outputs of masked tokens are zeros."""

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
            held, key_mask = block.k.shape[-2], join_masks(block.k, block.key_mask, k, key_mask)
            k, v = torch.cat([block.k, k], -2), torch.cat([block.v, v], -2)
            # the queries of the open block were answered before
            q = F.pad(q, (0, 0, held, 0))
        if key_mask is None:
            y, past = self._attend(q, k, v, past, None)
            return y[..., held:, :], BlindspotState(past, _open_block(k, v, None, self.size), self.size)
        packed = pack_heads(q, k, v, key_mask)
        y, past = self._attend(packed.q, packed.k, packed.v, past, packed.total)
        block = _open_block(packed.k, packed.v, packed.total, self.size)
        return packed.unpack(y)[..., held:, :], BlindspotState(past, block, self.size)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, past: LinearAttentionState | None, total: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """Attend from left-packed tokens that begin with a block, `total` per row (None: all)."""
        n, count, inner = k.shape[-2], k.shape[-2] // self.size, self.inner
        complete = None if total is None else torch.arange(count, device=k.device) < (total // self.size).unsqueeze(-1)
        k, v = k[..., : count * self.size, :], v[..., : count * self.size, :]
        (sums, scale), last = self._states(k, v, past, complete)
        queries = inner.per_group(inner.feature_map.query(F.pad(q, (0, 0, 0, (count + 1) * self.size - n))), k.shape[1])
        y = read(self._cut(queries.x), sums, normalize=inner.normalize, feature_map=queries.function)
        log_scale = None if queries.log_scale is None else self._cut(queries.log_scale.unsqueeze(-1)).squeeze(-1)
        y = inner.rescaled(y, log_scale, None if scale is None else scale.unsqueeze(-1))
        return y.flatten(-3, -2)[..., :n, :].flatten(1, 2).to(v.dtype), last

    def _states(
        self, k: Tensor, v: Tensor, past: LinearAttentionState | None, complete: Tensor | None
    ) -> tuple[LinearAttentionState, LinearAttentionState]:
        """Return the states before each block and after the last, (b hk 1 count+1 …); and the last. The past counts as
        a block, the first."""
        key_mask = None if complete is None else complete.repeat_interleave(self.size, -1).unsqueeze(2)
        keys, log_size = per_key_head(self._faded(self.inner.feature_map.key(k)), key_mask)
        if past is not None:
            self.inner.check_state(past, keys, v, scaled=log_size is not None)
        scales, scale, log_decay, largest = None, None, None, None
        if log_size is not None:
            count = k.shape[-2] // self.size
            first = None if past is None else past.log_scale
            first = log_size.new_full((*log_size.shape[:-1], 1), -torch.inf) if first is None else first
            tops = torch.cat([first, log_size.unflatten(-1, (count, self.size)).amax(-1)], -1)
            scale, log_decay, largest = running_scale(tops, self._decay_per_block(tops, complete))
            scales = scale[..., 1:].repeat_interleave(self.size, -1)
        sums = summarize(
            self._cut(keys.relative_to(scales)),
            self._cut(v.unsqueeze(2)),
            key_mask=None if key_mask is None else self._cut(key_mask.unsqueeze(-1)).squeeze(-1),
            feature_map=keys.function,
        )
        sums = LinearState(*(_accumulate(past and past.sums[i], x, log_decay) for i, x in enumerate(sums)))
        last = LinearState(*(x[:, :, :, -1].clone() for x in sums))
        return LinearAttentionState(sums, scale), LinearAttentionState(last, largest)

    def _faded(self, keys: Features) -> Features:
        """Return the features of the keys as they are when their block ends."""
        if self.inner.decay is not None:
            until = self.size - 1 - torch.arange(keys.x.shape[-2], device=keys.x.device) % self.size
            log_scale = (until * self.inner.decay()).expand(keys.x.shape[:-1])
            keys = keys._replace(log_scale=log_scale if keys.log_scale is None else keys.log_scale + log_scale)
        return keys.scalable()

    def _decay_per_block(self, tops: Tensor, complete: Tensor | None) -> Tensor:
        if self.inner.decay is None:
            return torch.zeros_like(tops)
        log_decay = (self.size * self.inner.decay()).unsqueeze(-1).expand_as(tops)
        return log_decay if complete is None else log_decay * F.pad(complete, (1, 0)).unsqueeze(2)

    def _cut(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (x.shape[-2] // self.size, self.size))

    def _check_state(self, state: BlindspotState, k: Tensor, v: Tensor) -> None:
        if state.size != self.size:
            raise ValueError(f"the state was made with a blindspot of {state.size}, but here it is {self.size}")
        for name, x, new in (("k", state.block.k, k), ("v", state.block.v, v)):
            check_part(name, x, new.dtype, new.shape[1], x.shape[-2], new.shape[3])

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _accumulate(first: Tensor | None, new: Tensor, log_decay: Tensor | None) -> Tensor:
    """x_0 = first (None: zero) and x_c = a_c x_{c-1} + new_c along dimension 3: sums are values with a feature of 1."""
    first = new.new_zeros(*new.shape[:3], *new.shape[4:]) if first is None else first
    x = torch.cat([first.unsqueeze(3), new], 3)
    one = x.new_ones(x.shape[3], 1)
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
