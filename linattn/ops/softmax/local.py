"""Softmax attention in a window: cost and memory are linear in the length times the window. Tokens are packed, missing
ones behind the present ones of their row: `present` is their mask (b hk n), None if all are present.

The sequence is cut into blocks of queries. Every block away from the borders sees keys at the same distances, so all of
them are one batched call with one small mask, on overlapping views of the keys; nothing is copied or padded. On a GPU
FlexAttention does the same in one kernel."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.nested import check_tokens
from linattn.ops.numerics import is_exporting
from linattn.ops.softmax import flex
from linattn.ops.softmax.kernel import among_present, fused_softmax
from linattn.ops.softmax.window import Window
from linattn.ops.tokens import cutting
from linattn.ops.tokens.compaction import last_tokens, pack_heads, per_query_head
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class LocalState(NamedTuple):
    """The last keys and values of each row, right-aligned, and the number of present tokens `seen` so far."""

    k: Keys
    v: Values
    seen: Int[Tensor, " b #hk"]


def local_attention(q: Queries, k: Keys, v: Values, /, *, window: Window, key_mask: KeyMask = None) -> Outputs:
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over the keys j in the window of query i.

    A masked token is a missing one: the window counts present tokens only, and the outputs of masked ones are zeros."""
    packed = pack_heads(q, k, v, key_mask)
    # zeros from packing stand behind every present token, where no causal query sees them
    return packed.unpack(_attend(packed.q, packed.k, packed.v, window, None if window.causal else packed.present))


def extend_local(
    q: Queries, k: Keys, v: Values, state: LocalState | None = None, /, *, window: Window, key_mask: KeyMask = None
) -> tuple[Outputs, LocalState]:
    """Process the next tokens of causal `local_attention`; masked ones leave no trace in the state."""
    if state is not None:
        check_tokens(state.k, state.v, k, v, window.past)
    packed = pack_heads(q, k, v, key_mask)
    y, state = _extend(packed.q, packed.k, packed.v, state, window, packed.total)
    return packed.unpack(y), state


def _attend(q: Tensor, k: Tensor, v: Tensor, window: Window, present: Tensor | None) -> Tensor:
    if is_exporting():
        return in_equal_blocks(q, k, v, window, present)
    if flex.unsupported(q, v) is None:
        return flex.flex_window(q, k, v, window=window, present=present)
    return in_blocks(q, k, v, window, present)


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: Window, present: Tensor | None, past: LocalState | None = None
) -> Tensor:
    """Return the outputs: blocks whose windows lie inside the sequence, and two borders. `past` precedes k and v."""
    n, block, after = q.shape[-2], window.block, 0 if window.causal else window.reach
    first, last = -(-window.reach // block), (n - after) // block
    start, stop = (first * block, last * block) if last > first else (n, n)
    if past is None:
        parts = [_border(q, k, v, window, present, 0, start)]
    else:
        keys, values = torch.cat([past.k, k[..., :start, :]], -2), torch.cat([past.v, v[..., :start, :]], -2)
        parts = [_after(past.seen, q[..., :start, :], keys, values, window)]
    if stop > start:
        parts.append(_blocks(q, k, v, window, present, start, stop))
    if n > stop:
        parts.append(_border(q, k, v, window, present, stop, n))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def in_equal_blocks(q: Tensor, k: Tensor, v: Tensor, window: Window, present: Tensor | None) -> Tensor:
    """Compute every block alike, with all blocks of keys in its reach, so that one graph serves every length."""
    b, h, n, _ = q.shape
    block, before = window.block, -(-window.reach // window.block)
    after = 0 if window.causal else before
    present = q.new_ones(b, 1, n, dtype=torch.bool) if present is None else present
    queries, k, v, present = (cutting.cut(x, block).transpose(1, 2) for x in (q, k, v, present.unsqueeze(-1)))
    count = queries.shape[1]

    def near(x: Tensor) -> Tensor:
        """Join the tokens of each block (b c hk block d) with those of the blocks in reach: (b·c hk length d)."""
        x = F.pad(x, (0, 0, 0, 0, 0, 0, before, after))
        return torch.cat([x.narrow(1, i, count) for i in range(before + 1 + after)], -2).flatten(0, 1)

    i = torch.arange(block, device=q.device)[:, None]
    j = torch.arange(-before * block, (1 + after) * block, device=q.device)
    visible = among_present(window.sees(i, j), near(present).squeeze(-1), i == j, h)
    y = fused_softmax(queries.flatten(0, 1), near(k), near(v), visible=visible)
    return cutting.join(y.unflatten(0, (b, count)).transpose(1, 2), n)


def _border(q: Tensor, k: Tensor, v: Tensor, window: Window, present: Tensor | None, start: int, stop: int) -> Tensor:
    """Return the outputs of the queries from start to stop, as one block."""
    n = k.shape[-2]
    left, right = max(start - window.reach, 0), stop if window.causal else min(stop + window.reach, n)
    q, k, v = q[..., start:stop, :], k[..., left:right, :], v[..., left:right, :]
    # all tokens of a short sequence see each other, and then the kernel needs no mask
    if present is None and start == 0 and right <= window.size:
        return fused_softmax(q, k, v, causal=window.causal)
    i, j = (torch.arange(*ends, device=q.device) for ends in ((start, stop), (left, right)))
    visible = window.sees(i[:, None], j[None])
    if present is not None:
        visible = among_present(visible, present[..., left:right], i[:, None] == j, q.shape[1])
    return fused_softmax(q, k, v, visible=visible)


def _blocks(q: Tensor, k: Tensor, v: Tensor, window: Window, present: Tensor | None, start: int, stop: int) -> Tensor:
    """Return the outputs of the queries from start to stop: whole blocks, whose windows lie inside the sequence."""
    b, h, hk, block = q.shape[0], q.shape[1], k.shape[1], window.block
    count, group = (stop - start) // block, h // hk
    left, right = start - window.reach, stop if window.causal else stop + window.reach
    length = right - left - (count - 1) * block
    # keys: (b·hk, blocks, length, d), overlapping views; queries: (b·hk, blocks·group, block, d)
    k, v = (x[..., left:right, :].flatten(0, 1).unfold(-2, length, block).mT for x in (k, v))
    q = q[..., start:stop, :].unflatten(1, (hk, group)).unflatten(3, (count, block)).transpose(2, 3)
    i = torch.arange(block, device=q.device)[:, None]
    j = torch.arange(length, device=q.device)[None] - window.reach
    visible = window.sees(i, j)
    if present is not None:
        near = present[..., left:right].expand(b, hk, -1).flatten(0, 1).unfold(-1, length, block)
        visible = among_present(visible, near, i == j, count * group)
    y = fused_softmax(q.flatten(0, 1).flatten(1, 2), k, v, visible=visible)
    return y.unflatten(1, (count, group)).transpose(1, 2).flatten(2, 3).unflatten(0, (b, hk)).flatten(1, 2)


def _after(seen: Tensor, q: Tensor, k: Tensor, v: Tensor, window: Window) -> Tensor:
    """Return the outputs of n queries at positions from `seen` on, where the last n keys and values stand too."""
    n = q.shape[-2]
    i = seen.unsqueeze(-1) + torch.arange(n, device=q.device)
    j = seen.unsqueeze(-1) + torch.arange(n - k.shape[-2], n, device=q.device)
    visible = window.sees(i.unsqueeze(-1), j.unsqueeze(-2)) & (j >= 0).unsqueeze(-2)
    return fused_softmax(q, k, v, visible=per_query_head(visible, q.shape[1]))


def _extend(
    q: Tensor, k: Tensor, v: Tensor, state: LocalState | None, window: Window, total: Tensor | None
) -> tuple[Tensor, LocalState]:
    """Return the outputs and the next state for packed tokens, of which the first `total` are present (None: all)."""
    if state is None:
        return _attend(q, k, v, window, None), advance(empty(k, v, window), k, v, total)
    n = q.shape[-2]
    if n == 1 and total is None:
        # the next state is a view of past and token together, which is no second copy
        k, v = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
        return _after(state.seen, q, k, v, window), LocalState(k[..., 1:, :], v[..., 1:, :], state.seen + 1)
    # rows may stand at different places in their buckets, so bucketed windows are computed one bucket at a time
    size = window.block if window.bucketed else max(n, 1)
    parts = []
    for i, (q1, k1, v1) in enumerate(zip(*(x.split(size, -2) for x in (q, k, v)), strict=True)):
        parts.append(in_blocks(q1, k1, v1, window, None, state))
        state = advance(state, k1, v1, None if total is None else (total - i * size).clamp(0, size))
    return torch.cat(parts, -2), state


def empty(k: Tensor, v: Tensor, window: Window) -> LocalState:
    shape = (*k.shape[:2], window.past)
    seen = torch.zeros(k.shape[0], 1, dtype=torch.int64, device=k.device)
    return LocalState(k.new_zeros(*shape, k.shape[-1]), v.new_zeros(*shape, v.shape[-1]), seen)


def advance(state: LocalState, k: Tensor, v: Tensor, total: Tensor | None) -> LocalState:
    seen = state.seen + (k.shape[-2] if total is None else total)
    return LocalState(last_tokens(state.k, k, total), last_tokens(state.v, v, total), seen)
