"""Matrix products inside chunks of tokens, a running state between them: the form for training and prefill, on any
device. Blocks of the sequence small enough for the cache are loaded, mapped, multiplied and written once.

With D_ij the decay from key j to query i, r_i that since the chunk began, w_j that until it ends, a that over it all,

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v

The gradient is of the same kind, in reverse (Katharopoulos et al., https://arxiv.org/abs/2006.16236, eq. 13–15). What
is saved for it is the inputs and one state for every segment of tokens; the rest is computed again, y included: what
rounding to half precision takes off y would be most of dN·(v − y) where values have a mean."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall, divide, infinite_if_none
from linattn.ops.backends.blocks import (
    Block,
    Tile,
    cut,
    load,
    number_of_blocks,
    of_queries,
    rows_of,
    spread_keys,
    write,
    write_keys,
)
from linattn.ops.backends.memory import Workspace, empty_like
from linattn.ops.backends.operator import Backend, Tensors, cannot_export
from linattn.ops.elementwise import ELEMENTWISE


class Ends(NamedTuple):
    """States at the c + 1 ends of a block's chunks, (c+1 b f dv) and (c+1 b f)."""

    S: Tensor
    z: Tensor

    def before(self) -> tuple[Tensor, Tensor]:
        """Return the states that enter each chunk, (cb f dv) and (cb 1 f)."""
        return self.S[:-1].flatten(0, 1), self.z[:-1].flatten(0, 1).unsqueeze(1)

    def after(self) -> tuple[Tensor, Tensor]:
        return self.S[1:].flatten(0, 1), self.z[1:].flatten(0, 1).unsqueeze(1)


def _per_group(x: Tensor, block: Block) -> Tensor:
    """(cb gC …) as (cb g C …)"""
    return x.unflatten(1, (-1, block.k.shape[1]))


def _weigh(A: Tensor, block: Block) -> Tensor:
    """A ∘ D, in place. What a query must not see is overwritten, not multiplied by zero: it may be infinite."""
    parts = _per_group(A, block)
    if block.decay is not None:
        parts.mul_(block.decay.inside)
    parts.tril_()
    return A


def _weights(block: Block) -> Tensor:
    """D itself, (cb C C)."""
    n, C, _ = block.k.shape
    return _weigh(block.k.new_ones(n, C, C), block)


def _since(x: Tensor, block: Block) -> Tensor:
    return x if block.decay is None else (_per_group(x, block) * block.decay.since).flatten(1, 2)


def _until(x: Tensor, block: Block) -> Tensor:
    return x if block.decay is None else x * block.decay.until.squeeze(1)


def _dot(x: Tensor, y: Tensor, work: Workspace) -> Tensor:
    """Return x·y per row. As a matrix product it would take half the time of a full one."""
    return torch.mul(x, y, out=work.scratch(x)).sum(-1, keepdim=True)


def _ends(
    state: tuple[Tensor, Tensor], block: Block, first: int, work: Workspace, names: tuple[str, str] = ("S", "z")
) -> Ends:
    """Room for the states at the ends of all chunks, that at the first or the last of them given."""
    ends = Ends(*(work(name, block.chunks + 1, *x.shape) for name, x in zip(names, state, strict=True)))
    for x, given in zip(ends, state, strict=True):
        x[first] = given
    return ends


def _accumulate(ends: Ends, block: Block, *, reverse: bool = False) -> None:
    """Scan over chunks in place: S_{c+1} = a_c S_c + ΔS_c. Runs backwards for gradients."""
    whole = None if block.decay is None else block.decay.whole.unbind(0)
    for x, weights in ((ends.S, whole), (ends.z, whole and [a.squeeze(-1) for a in whole])):
        states = x.unbind(0)
        for i in reversed(range(len(states) - 1)) if reverse else range(len(states) - 1):
            done, following = (states[i + 1], states[i]) if reverse else (states[i], states[i + 1])
            following.add_(done) if weights is None else following.addcmul_(done, weights[i])


def _states(block: Block, state: tuple[Tensor, Tensor], work: Workspace) -> Ends:
    """Return the states at the ends of all chunks, from the state that enters the block, (b f dv) and (b f)."""
    ends, k = _ends(state, block, 0, work), _until(block.k, block)
    S, z = ends.after()
    S.baddbmm_(k.mT, block.v, beta=0)
    z.copy_(k.sum(1, keepdim=True))
    _accumulate(ends, block)
    return ends


def _denominator(A: Tensor, q_in: Tensor, z_in: Tensor, block: Block, work: Workspace) -> Tensor:
    total = A.sum(-1, keepdim=True).add_(_dot(q_in, z_in, work))
    return infinite_if_none(total, nonnegative=block.nonnegative)


def _key_sums(block: Block, z_in: Tensor) -> Tensor:
    """z_i, the sum of the keys that each query sees, (cb C f)."""
    return _since(z_in.expand_as(block.k), block) + _weights(block) @ block.k


def _over_key_sums(x: Tensor, total: Tensor, block: Block) -> Tensor:
    return divide(_per_group(x, block), total.unsqueeze(1)).flatten(1, 2)


def _product(a: Tensor, b: Tensor, work: Workspace, name: str) -> Tensor:
    return work(name, *a.shape[:2], b.shape[2]).baddbmm_(a, b, beta=0)


def _similarities(q: Tensor, block: Block, work: Workspace) -> Tensor:
    """A = q kᵀ ∘ D"""
    return _weigh(_product(q, block.k.mT, work, "A"), block)


def _outputs(block: Block, ends: Ends, normalize: str | None, work: Workspace) -> Tensor:
    """(cb gC dv)"""
    (S_in, z_in), q = ends.before(), block.q
    if normalize == "keys":
        q = _over_key_sums(q, _key_sums(block, z_in), block)
    A, q_in = _similarities(q, block, work), _since(q, block)
    y = _product(A, block.v, work, "y").baddbmm_(q_in, S_in)
    return y.div_(_denominator(A, q_in, z_in, block, work)) if normalize == "output" else y


def _state_of(S: Tensor, z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """(b f dv) and (b f)"""
    return rows_of(S, rows).flatten(0, -3), rows_of(z, rows).flatten(0, -2)


def forward(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the last state, and the states (i, lead, f, dv) that enter each block if they are to be saved."""
    plan, dv = cut(call), call.S.shape[-1]
    y = empty_like(call.v, (*call.q.shape[:-1], dv))
    S_end, z_end = call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape)
    saved = _room_for_states(call, save)
    spread, work = spread_keys(call), Workspace(call.S)
    for rows, tiles in plan:
        state = _state_of(call.S, call.z, rows)
        for i, tile in enumerate(tiles):
            if save:
                _save(state, (saved[0][i], saved[1][i]), rows)
            block = load(spread, tile, work)
            ends = _states(block, state, work)
            write(y, tile, _outputs(block, ends, call.normalize, work))
            state = ends.S[-1], ends.z[-1]
        _save(state, (S_end, z_end), rows)
    return y, S_end, z_end, saved[0], saved[1]


def _room_for_states(call: CausalCall, save: bool) -> tuple[Tensor, Tensor]:
    entering = number_of_blocks(call) if save else 0
    return call.S.new_empty(entering, *call.S.shape), call.z.new_empty(entering, *call.z.shape)


def _save(state: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor], rows: slice) -> None:
    for x, target in zip(state, into, strict=True):
        target = rows_of(target, rows)
        target.copy_(x.view(target.shape))


class Gradients(NamedTuple):
    """Gradients of the call's queries, keys, values and decays, the last as (…, n, 1)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None


class Shared(NamedTuple):
    """Tensors that the gradients of keys need and those of queries computed."""

    dN: Tensor  # gradient of the numerator, (cb gC dv)
    G: Tensor  # gradient of q kᵀ, (cb gC C)
    A: Tensor  # D ∘ q kᵀ, (cb gC C)
    q: Tensor  # queries as the keys meet them: over the key sums with "keys", (cb gC f)
    q_in: Tensor  # the same, decayed since the chunk began
    dz: Tensor | None  # gradient of the z that enters each chunk, (cb 1 f)
    dtotal: Tensor | None  # gradient of the key sums, (cb C f)
    crossing: Tensor | None  # gradient of the decays through this chunk's queries, (cb C 1)


def _to_queries(
    call: CausalCall, tile: Tile, block: Block, ends: Ends, dy: Tensor, into: Gradients, work: Workspace
) -> Shared:
    """Writes their gradients. With y = N / d, dN = dy / d and dd = −dN·y = −dN·N / d."""
    (S_in, z_in), normalize = ends.before(), call.normalize
    q, k, total, dz, dtotal, crossing = block.q, block.k, None, None, None, None
    if normalize == "keys":
        total = _key_sums(block, z_in)
        q = _over_key_sums(q, total, block)
    A, q_in = _similarities(q, block, work), _since(q, block)
    dN, d = of_queries(dy, tile, work, "y"), None
    if normalize == "output":
        d = _denominator(A, q_in, z_in, block, work)
        dN.div_(d)
    dq, G = _product(dN, S_in.mT, work, "dq"), _product(dN, block.v.mT, work, "G")
    if d is not None:
        # dN·N from the products at hand: y itself was rounded
        dd = _dot(q_in, dq, work).add_(_dot(A, G, work)).div_(d).neg_()
        dq.addcmul_(dd, z_in)
        G.add_(dd)
        dz = torch.mul(q_in, dd, out=work.scratch(q_in)).sum(1, keepdim=True)
    if block.decay is not None:
        crossing = _crossing(A, G, _dot(q_in, dq, work), block)
    dq = _since(dq, block).baddbmm_(_weigh(G, block), k)
    if total is not None:
        dtotal = -divide(_per_group(dq * q, block).sum(1), total)
        of_z = _since(dtotal, block)
        dz = of_z.sum(1, keepdim=True)
        dq = _over_key_sums(dq, total, block)
        if crossing is not None:
            crossing += _crossing(_weights(block), dtotal @ k.mT, _dot(of_z, z_in.expand_as(of_z), work), block)
    write(into.q, tile, _through_map(dq, block.q, call, work))
    return Shared(dN, G, A, q, q_in, dz, dtotal, crossing)


def _crossing(A: Tensor, G: Tensor, Q: Tensor, block: Block) -> Tensor:
    """The gradient of each token's decay through the queries of its chunk, (cb C 1): Σ A_ij G_ij over the pairs that
    cross it, i ≥ t > j, and Σ Q_i over i ≥ t for the state before the chunk. A difference of sums over all pairs would
    leave their rounding where decays are strong."""
    Q, pairs = _per_group(Q, block).sum(1), _per_group(A * G, block).sum(1)
    before = Q + pairs @ pairs.new_ones(pairs.shape[1:]).triu(1)
    return before.tril().sum(1).unsqueeze(-1)


def _to_keys(
    call: CausalCall,
    tile: Tile,
    block: Block,
    past: Shared,
    entering: tuple[Tensor, Tensor],
    dstate: tuple[Tensor, Tensor],
    into: Gradients,
    work: Workspace,
) -> tuple[Tensor, Tensor]:
    """Writes the gradients of keys, values and decays; returns that of the state before the block, from that of the
    state after it. `entering` are the states before each chunk."""
    k, v, ends = block.k, block.v, _ends(dstate, block, -1, work, ("dS", "dz"))
    dS, dz = ends.before()
    dS.baddbmm_(past.q_in.mT, past.dN, beta=0)
    dz.zero_() if past.dz is None else dz.copy_(past.dz)
    _accumulate(ends, block, reverse=True)
    dS, dz = ends.after()
    dv, dk = _product(_until(k, block), dS, work, "dv"), _product(_until(v, block), dS.mT, work, "dk")
    dk.add_(_until(dz, block))
    if into.log_decay is not None and past.crossing is not None and block.decay is not None:
        later = _dot(k, dk, work)
        over = block.decay.whole.flatten(0, 1) * sum(
            (x * dx).sum((1, 2), keepdim=True) for x, dx in zip(entering, (dS, dz), strict=True)
        )
        of_decay = past.crossing + (later.cumsum(1) - later) + over
        write_keys(into.log_decay, tile, of_decay, block._replace(missing=None), call)
    dv.baddbmm_(past.A.mT, past.dN)
    dk.baddbmm_(past.G.mT, past.q)
    write_keys(into.v, tile, dv, block, call)
    if past.dtotal is not None:
        dk.baddbmm_(_weights(block).mT, past.dtotal)
    write_keys(into.k, tile, _through_map(dk, k, call, work), block, call)
    return ends.S[0].clone(), ends.z[0].clone()


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Gradients of the call's seven tensors, in one pass over the blocks from the last to the first."""
    dy, dS_end, dz_end = grads
    assert dy is not None and dS_end is not None and dz_end is not None
    plan, (saved_S, saved_z) = cut(call), saved
    if not plan:
        # what is broadcast over no rows has a gradient of zeros
        return *(None if x is None else torch.zeros_like(x) for x in call[:6]), None
    if saved_S is None or saved_z is None or saved_S.shape[0] == 0:
        saved_S, saved_z = forward(call, save=True)[3:]
    dq, dk, dv = (empty_like(x, x.shape) for x in call[:3])
    dS_start, dz_start = call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape)
    of_decay = None if call.log_decay is None else call.S.new_empty(*call.log_decay.shape, 1)
    spread, into, work = spread_keys(call), Gradients(dq, dk, dv, of_decay), Workspace(call.S)
    for rows, tiles in plan:
        dstate = _state_of(dS_end, dz_end, rows)
        for i, tile in reversed(list(enumerate(tiles))):
            block = load(spread, tile, work)
            ends = _states(block, _state_of(saved_S[i], saved_z[i], rows), work)
            past = _to_queries(call, tile, block, ends, dy, into, work)
            dstate = _to_keys(call, tile, block, past, ends.before(), dstate, into, work)
        _save(dstate, (dS_start, dz_start), rows)
    if call.log_decay is not None and of_decay is not None:
        # a decay of −inf has no gradient: it begins a new sequence
        of_decay = of_decay.squeeze(-1).masked_fill(call.log_decay == -torch.inf, 0).to(call.log_decay.dtype)
    return dq, dk, dv, dS_start, dz_start, of_decay, None


def _through_map(gradient: Tensor, features: Tensor, call: CausalCall, work: Workspace) -> Tensor:
    """The chain rule: from the gradient of φ(x) that of x, in place."""
    derivative = ELEMENTWISE[call.feature_map].derivative
    return gradient if derivative is None else gradient.mul_(derivative(features, work.scratch(features)))


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    y = call.v.new_empty(*call.q.shape[:-1], call.S.shape[-1])
    return y, call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape), *_room_for_states(call, save)


BACKEND = Backend("chunked", cannot_export, forward, gradient, empty, saved=2)
