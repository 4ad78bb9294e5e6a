"""The gradient of gated linear attention, from the last block to the first. What is saved for it is the inputs and one
state per block; the rest is computed again. Gradients of decays are sums of products over what crosses them, and never
differences, so those of strong decays keep their digits."""

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall, decay_gradient, divide, summed
from linattn.ops.backends.chunked import IDENTITY, Tile, arrange, cut, scan
from linattn.ops.backends.gated import (
    Block,
    Tree,
    asking,
    denominators,
    forward,
    key_sums,
    load,
    over,
    per_token,
    read,
    states,
    write,
)
from linattn.ops.backends.operator import Tensors
from linattn.ops.backends.workspace import Workspace, empty_like
from linattn.ops.elementwise import ELEMENTWISE


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of the call's seven tensors."""
    (S_saved, z_saved), (dy, dS, dz) = saved, grads
    assert dy is not None and dS is not None and dz is not None and call.log_decay is not None
    if S_saved is None or z_saved is None or S_saved.shape[0] == 0:
        S_saved, z_saved = forward(call, save=True)[3:]
    dq, phi, work = empty_like(call.q, call.q.shape), ELEMENTWISE[call.feature_map], Workspace(call.S)
    given, (dq_view, dy) = arrange(call, dq, dy)
    assert given.log_decay is not None
    dk, dv = (empty_like(x, x.shape) for x in (given.k, given.v))
    dlog_decay = call.S.new_empty(given.log_decay.shape)
    dS, dz = dS.flatten(0, -3).clone(), dz.unsqueeze(-2).flatten(0, -3).clone()
    for rows, tiles in cut(call):
        for i, tile in reversed(list(enumerate(tiles))):
            block, upstream = load(given, tile, work), read(tile, dy, work, "y", IDENTITY)
            entering, leaving = (S_saved[i, rows], z_saved[i, rows]), (dS[rows], dz[rows])
            found, (dS[rows], dz[rows]) = _of_block(block, entering, upstream, leaving)
            of_q, of_k, of_v, of_decay = found
            write(tile, dq_view, work.through_map(of_q, block.q, phi))
            write(tile, dk, work.through_map(of_k, block.k, phi))
            write(tile, dv, of_v)
            write(tile, dlog_decay, of_decay)
    dlog_decay = decay_gradient(dlog_decay, call.log_decay)
    return dq, summed(dk, call.k), summed(dv, call.v), dS.view_as(call.S), dz.view_as(call.z), dlog_decay, None


def _of_block(
    block: Block, entering: tuple[Tensor, Tensor], dN: Tensor, leaving: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return the gradients of queries, keys, values and decays, and of the state that enters. Given are that state, the
    gradients of the outputs, which are overwritten, and of the state that leaves."""
    (S, z), (dS, dz), b = entering, leaving, len(leaving[0])
    sums = key_sums(block.k, block.alpha, z, block.tile)
    d = denominators(block, sums) if block.normalize == "output" else None
    if d is not None:
        dN.div_(d)
    tree = Tree(block, asking(block, sums), keep=True)
    S_in, dS_ends = states(block, tree, S)[:-b], _of_states(block, tree, dN, dS)
    dv = torch.bmm(tree.k, dS_ends[b:]).baddbmm_(tree.A.mT, dN)
    crossing = tree.w * (S_in * dS_ends[b:]).sum(-1)
    dq, dk = torch.bmm(dN, S_in.mT), torch.bmm(block.v, dS_ends[b:].mT)
    dq, dk, dlog_decay = tree.gradient(torch.bmm(dN, block.v.mT), dq, dk, crossing)
    dq, dsums = _of_key_sums(block, tree.asking, sums, d, dq)
    added, dz = _of_scan(block, dsums, dz)
    dk.add_(added)
    dlog_decay.addcmul_(added, block.alpha * _before(sums, z))
    if block.missing is not None:
        dk.masked_fill_(block.missing, 0)
        dv.masked_fill_(block.missing, 0)
    return (dq, dk, dv, dlog_decay), (dS_ends[:b], dz)


def _of_states(block: Block, tree: Tree, dN: Tensor, dS: Tensor) -> Tensor:
    """Return the gradients of the states at the ends of all chunks, (cb+b f dv), from those after the block."""
    ends = block.work("dS", (len(block.k) + len(dS), *dS.shape[1:]))
    ends[-len(dS) :] = dS
    ends[: -len(dS)].baddbmm_(tree.q.mT, dN, beta=0)
    scan(ends, block.tile, over(block, tree), reverse=True)
    return ends


def _of_key_sums(block: Block, asked: Tensor, sums: Tensor, d: Tensor | None, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and of key sums, given that of the numerator's queries."""
    per_query, dper_query, z = per_token(asked, sums), per_token(dq, sums), sums.unsqueeze(2)
    if block.normalize == "keys":
        return divide(dper_query, z).flatten(1, 2), -divide((per_query * dper_query).sum(2), sums)
    if d is None:
        return dq, torch.zeros_like(sums)
    # y = N / d: dd = −dN·N / d, with dN·N from the products at hand, as y itself was rounded
    dd = per_token((asked * dq).sum(-1, keepdim=True).div_(d).neg_(), sums)
    return dper_query.addcmul_(dd, z).flatten(1, 2), (dd * per_query).sum(2)


def _of_scan(block: Block, dsums: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Return what key sums add to the gradients of keys, and the gradient of the sums that enter, (b 1 f): the same
    scan in reverse, g_t = dz_t + α_{t+1} g_{t+1}."""
    tile, alpha = block.tile, _reversed(block.alpha, block.tile)
    later = _before(alpha, torch.ones_like(dz))
    g = key_sums(_reversed(dsums, tile), later, dz, tile)
    return _reversed(g, tile), g[-len(dz) :, -1:] * alpha[-len(dz) :, -1:]


def _reversed(x: Tensor, tile: Tile) -> Tensor:
    """Turn the tokens of a block (cb C f) around."""
    return x.unflatten(0, (tile.number, -1)).flip(0, 2).flatten(0, 1)


def _before(x: Tensor, first: Tensor) -> Tensor:
    """Return what stands before each token of a block (cb C f), given that for the first (b 1 f)."""
    ends = torch.cat([first, x[: len(x) - len(first), -1:]])
    return torch.cat([ends, x[:, :-1]], 1)
