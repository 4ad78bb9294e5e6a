"""The delta rule in torch's own operators, without a loop over the length.

A chunk's tokens map the state that enters it to the one that leaves, T S + U. The definition's steps give [T, U] of all
chunks at once, when they start from [1, 0]; each is then joined with the one before it, the two before these, and so
on. Derivatives keep a state per token in memory, which the chunked form does not."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.calls import DeltaCall
from linattn.ops.definitions.delta import step
from linattn.ops.numerics import accumulator, exactly
from linattn.ops.operator import Backend
from linattn.ops.tokens.cutting import cut, join

CHUNK = 16
# for any length: 2³⁰ tokens
STEPS = 26


def forward(call: DeltaCall, save: bool) -> tuple[Tensor, Tensor]:
    dtype, (d, dv), n = accumulator(call.q.dtype), call.S.shape[-2:], call.q.shape[-2]
    tensors = call.q, call.k, F.pad(call.v, (d, 0)), call.beta, call.log_decay, call.removal_key
    each = [[None] * CHUNK if x is None else cut(x.to(dtype), CHUNK).split(1, -2) for x in tensors]
    maps, reads = torch.eye(d, d + dv, dtype=dtype, device=call.q.device), []
    for token in zip(*each, strict=True):
        read, maps = step(maps, *token)
        reads.append(read)
    states = _states(maps, call.S, _steps(maps.shape[-3]))
    read = torch.cat(reads, -2)
    y = read[..., :d] @ states[..., :-1, :, :] + read[..., d:]
    # a copy, as a view would keep the states of all chunks alive
    return (join(y, n) * call.scale).to(call.v.dtype), states[..., -1, :, :].clone()


def _steps(count: int) -> int:
    """Return how many doublings of 1 reach `count`; if an exported graph leaves `count` open, STEPS."""
    # imported here, because it takes sympy
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return next((steps for steps in range(STEPS) if statically_known_true(count <= 2**steps)), STEPS)


def _states(maps: Tensor, S: Tensor, doublings: int) -> Tensor:
    """Return the states before each of c chunks and after the last (… c+1 d dv): S first, then each chunk's T S + U,
    with its map [T, U]."""
    d, index = S.shape[-2], torch.arange(maps.shape[-3], device=maps.device)
    for distance in (2**i for i in range(doublings)):
        # not index_select, see `join`
        earlier = maps[..., (index - distance).clamp(min=0), :, :]
        joined = maps[..., :d] @ earlier + F.pad(maps[..., d:], (d, 0))
        maps = torch.where((index >= distance).view(-1, 1, 1), joined, maps)
    S = S.unsqueeze(-3)
    after = maps[..., :d] @ S + maps[..., d:]
    return torch.cat([S, after.expand(*S.shape[:-3], *after.shape[-3:])], -3)


BACKEND = Backend("plain", None, exactly(forward))
