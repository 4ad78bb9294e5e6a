"""Linear attention with a blindspot for rows that have different numbers of tokens: each row's blocks count its own
present tokens, so that padding moves no border between blocks."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.linear import causal_linear_attention
from linattn.ops.state import LinearState


class RaggedState(NamedTuple):
    """The sums over the whole blocks, which queries see; those over the open block; and how many tokens it has."""

    seen: LinearState
    block: LinearState
    held: Int[Tensor, "b hk"]
    blindspot: int


class _Tokens(NamedTuple):
    """Features of queries (b hk g n f) and keys, values and decays (b hk 1 n …), and how many are present in each row:
    the first ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    present: Tensor


def attend_in_ragged_blocks(
    q: Float[Tensor, "b hk g n d"],
    k: Float[Tensor, "b hk 1 n d"],
    v: Float[Tensor, "b hk 1 n dv"],
    state: LinearState | RaggedState | None,
    *,
    total: Int[Tensor, " b #hk"],
    size: int,
    log_decay: Float[Tensor, "*#b #n"] | None,
    normalize: str | None,
    feature_map: str,
) -> tuple[Float[Tensor, "b hk g n dv"], RaggedState]:
    """`causal_linear_attention` with a blindspot of `size`, where only the first `total` tokens of a row are present.

    Step by step: in each, every row ends its open block, or as much of it as it has tokens for."""
    n, width = k.shape[-2], min(size, k.shape[-2])
    # keys are left out by making their features zero, so the features are needed themselves
    q, k = ELEMENTWISE[feature_map].function(q), ELEMENTWISE[feature_map].function(k)
    log_decay = k.new_zeros(()) if log_decay is None else log_decay
    tokens = _Tokens(q, k, v, log_decay.expand(k.shape[:-1]), total.expand(k.shape[:2]))
    state = _ragged(state, tokens, size)
    if n == 0:
        return v.expand(*q.shape[:3], -1, -1), state
    first, outputs, done = state.held, [], torch.zeros_like(state.held)
    for _ in range((n + size - 2) // size + 1):
        count = torch.minimum(size - state.held, tokens.present - done).clamp(min=0)
        y, state = _step(_slice(tokens, done, count, width), state, size, normalize)
        outputs.append(y)
        done = done + count
    return _in_order(outputs, first, n, size), state


def _ragged(state: LinearState | RaggedState | None, tokens: _Tokens, size: int) -> RaggedState:
    """Make a ragged state of one whose rows have the same number of tokens, or of none."""
    if isinstance(state, RaggedState):
        return state
    k, v = tokens.k[..., :0, :], tokens.v[..., :0, :]
    zeros = causal_linear_attention(k, k, v, normalize=None)[1]
    if state is None:
        return RaggedState(zeros, zeros, torch.zeros_like(tokens.present), size)
    block = zeros
    if state.block_S is not None and state.block_z is not None:
        block = LinearState(state.block_S, state.block_z)
    held = torch.full_like(tokens.present, state.block_length)
    return RaggedState(LinearState(state.S, state.z), block, held, size)


def _slice(tokens: _Tokens, start: Tensor, count: Tensor, width: int) -> _Tokens:
    """`count` tokens of each row from `start`; what is beyond neither adds nor decays."""
    places = torch.arange(width, device=start.device)
    index = (start.unsqueeze(-1) + places).clamp(max=tokens.k.shape[-2] - 1).unsqueeze(2)
    here = (places < count.unsqueeze(-1)).unsqueeze(2)
    q, k, v = (torch.take_along_dim(x, index.unsqueeze(-1), -2) for x in (tokens.q, tokens.k, tokens.v))
    log_decay = torch.where(here, torch.take_along_dim(tokens.log_decay, index, -1), 0)
    return _Tokens(q, torch.where(here.unsqueeze(-1), k, 0), v, log_decay, count)


def _step(tokens: _Tokens, state: RaggedState, size: int, normalize: str | None) -> tuple[Tensor, RaggedState]:
    """Queries read the whole blocks; keys join the open one, and with it the whole ones where it is full."""
    q, k, v, log_decay, count = tokens
    hidden = torch.zeros_like(k)
    y, seen = causal_linear_attention(q, hidden, v, state.seen, log_decay=log_decay, normalize=normalize)
    _, block = causal_linear_attention(k, k, v, state.block, log_decay=log_decay, normalize=None)
    held = state.held + count
    full = (held == size)[..., None, None]
    joining = LinearState(torch.where(full[..., None], block.S, 0), torch.where(full, block.z, 0))
    seen = LinearState(seen.S + joining.S, seen.z + joining.z)
    return y, RaggedState(seen, LinearState(block.S - joining.S, block.z - joining.z), held % size, size)


def _in_order(outputs: list[Tensor], first: Tensor, n: int, size: int) -> Tensor:
    """Order the steps' outputs by token; the first step began with `first` tokens in the open block."""
    width = outputs[0].shape[-2]
    index = torch.arange(n, device=first.device) + first.unsqueeze(-1)
    begun = torch.where(index < size, first.unsqueeze(-1), 0)
    place = (index // size * width + index % size - begun).clamp(max=len(outputs) * width - 1)
    return torch.take_along_dim(torch.cat(outputs, -2), place[:, :, None, :, None], -2)
