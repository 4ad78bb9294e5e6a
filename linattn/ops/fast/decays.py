"""Products of rows (B g C d) and keys (B C d) inside B chunks of C tokens, with decays (B C 1) per head or (B C d) per
channel. Rows are the tokens that read: queries, and under the delta rule keys too. With the factors α_t =
exp(log_decay_t) of tokens, D_ij is the product of α_t over j < t ≤ i, r_i that over t ≤ i, w_j that over t > j and a
that over all t of the chunk. A chunked form needs, with their gradients,

    P_ij = Σ_e rows_ie D_ij,e keys_je  for j ≤ i, else 0        r ∘ rows        w ∘ keys        a

The quotients D_ij = r_i / r_j would overflow, so no kind of decay divides by r. Decays per channel: Yang et al., Gated
Linear Attention, https://arxiv.org/abs/2312.06635."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.block_tree import (
    as_blocks,
    block_products,
    block_products_gradient,
    diagonal_blocks,
    halves,
    off_diagonal,
    row_blocks,
)
from linattn.ops.fast.blocks import Workspace
from linattn.ops.fast.decay_weights import decay_weights, sum_crossing
from linattn.ops.numerics import is_readable


class Decays(ABC):
    """The decays of the chunks of one block, applied to their rows and keys."""

    rows_since_start: Tensor
    """r ∘ rows, what the rows are to the state that enters the chunk: (B g C d)."""

    keys_until_end: Tensor
    """w ∘ keys, what the keys add to the state that leaves the chunk: (B C d)."""

    chunk_decay: Tensor | None
    """a, (B e 1), with e = 1 per head and e = d per channel; None if nothing decays."""

    @abstractmethod
    def products(self) -> Tensor:
        """Compute P, (B g C C), in memory that the next block overwrites."""

    @abstractmethod
    def gradient(
        self, products: Tensor, dproducts: Tensor, drows: Tensor, dkeys: Tensor, da: Tensor | None
    ) -> Tensor | None:
        """Return the gradient of log α, (B C 1) or (B C d), or None if nothing decays. `products` are P; `dproducts` is
        the gradient of P, and overwritten; `da` is that of a. Turn `drows` and `dkeys` in place from the gradients of
        r ∘ rows and w ∘ keys into those of rows and keys."""


def intra_chunk(rows: Tensor, keys: Tensor, log_decay: Tensor | None, work: Workspace) -> Decays:
    """Return the decays between the `rows` (B g C d), such as queries, and the `keys` (B C d) of a chunk: a `NoDecay`
    without `log_decay`, a `PerHead` for one (B C 1), a `PerChannel` for one (B C d), where C must be a power of two.
    `log_decay` is overwritten; temporary tensors come from `work`."""
    if log_decay is None:
        return NoDecay(rows, keys, work)
    if log_decay.shape[-1] == 1:
        return PerHead(rows, keys, log_decay, work)
    # leaves of many tokens look at numbers
    leaf = min(LEAF, log_decay.shape[-2]) if is_readable(log_decay) and log_decay.numel() else 1
    return PerChannel(rows, keys, ELEMENTWISE["exp"].overwrite(log_decay, None), work, leaf)


@final
@dataclass
class NoDecay(Decays):
    """D = r = w = a = 1, so P = tril(rows keysᵀ)."""

    rows_since_start: Tensor
    keys_until_end: Tensor
    work: Workspace
    chunk_decay: Tensor | None = None

    def products(self) -> Tensor:
        rows = self.rows_since_start
        products = torch.bmm(rows.flatten(1, 2), self.keys_until_end.mT, out=self.work("products"))
        return products.view(*rows.shape[:-1], rows.shape[-2]).tril_()

    def gradient(self, products: Tensor, dproducts: Tensor, drows: Tensor, dkeys: Tensor, da: Tensor | None) -> None:
        G = dproducts.tril_().flatten(1, 2)
        drows.flatten(1, 2).baddbmm_(G, self.keys_until_end)
        dkeys.baddbmm_(G.mT, self.rows_since_start.flatten(1, 2))


@final
class PerHead(Decays):
    """D is one matrix per head, so P = tril(rows keysᵀ ∘ D)."""

    def __init__(self, rows: Tensor, keys: Tensor, log_decay: Tensor, work: Workspace):
        self.rows, self.keys, self.work = rows, keys, work
        self.D, self.r, w = decay_weights(log_decay)
        self.w = w.squeeze(1)
        self.chunk_decay = self.a = self.r[:, 0, -1:]
        self.rows_since_start = torch.mul(rows, self.r, out=work("rows_since_start"))
        self.keys_until_end = torch.mul(keys, self.w, out=work("keys_until_end"))

    def products(self) -> Tensor:
        products = torch.bmm(self.rows.flatten(1, 2), self.keys.mT, out=self.work("products"))
        # products with later keys are overwritten, not multiplied by zero: they may be infinite
        return products.view(*self.rows.shape[:-1], self.rows.shape[-2]).mul_(self.D).tril_()

    def gradient(self, products: Tensor, dproducts: Tensor, drows: Tensor, dkeys: Tensor, da: Tensor | None) -> Tensor:
        assert da is not None
        drows.mul_(self.r)
        dkeys.mul_(self.w)
        of_rows = torch.mul(self.rows, drows, out=self.work("scratch")).sum(-1).sum(1)
        of_keys = torch.mul(self.keys, dkeys, out=self.work("scratch")).sum(-1)
        pairs = torch.mul(dproducts, products, out=self.work("scratch")).sum(1)
        G = dproducts.mul_(self.D).tril_().flatten(1, 2)
        drows.flatten(1, 2).baddbmm_(G, self.keys)
        dkeys.baddbmm_(G.mT, self.rows.flatten(1, 2))
        dlog_decay = sum_crossing(pairs, of_rows.unsqueeze(-1), of_keys.unsqueeze(-1))
        return dlog_decay + self.a * da.sum((1, 2), keepdim=True)


@final
class PerChannel(Decays):
    """A tree over the chunk. Its leaves are blocks of `leaf` tokens; neighbouring blocks are joined two by two until
    one is left. If a row and a key are in different leaves, exactly one joint has the key in its first block and the
    row in its second. D_ij is then the decay from the key to the border of the blocks, times that from the border to
    the row, of which none is above 1. Inside leaves, products are those of `_Tokens` or `_Leaves`."""

    def __init__(self, rows: Tensor, keys: Tensor, alpha: Tensor, work: Workspace, leaf: int):
        self.rows, self.keys, self.work = rows, keys, work
        since = self.rows_since_start = work(f"rows_since_start{leaf}", rows.shape)
        until = self.keys_until_end = work(f"keys_until_end{leaf}", keys.shape)
        self.leaves = (_Tokens if leaf == 1 else _Leaves)(rows, keys, as_blocks(alpha, leaf), since, until, work)
        self.joints, decay = list[_Joint](), self.leaves.decay
        while decay.shape[1] > 1:
            self.joints.append(_Joint(decay, since, until, work))
            decay = self.joints[-1].decay
        self.chunk_decay = self.a = decay.squeeze(1).mT

    def products(self) -> Tensor:
        products = self.work(f"products{self.leaves.size}", (*self.rows.shape[:-1], self.rows.shape[-2])).zero_()
        diagonal_blocks(products, self.leaves.size).copy_(self.leaves.products().movedim(2, 1))
        for joint in self.joints:
            off_diagonal(products, joint.size).copy_(block_products(joint.rows, joint.keys).movedim(2, 1))
        return products

    def gradient(self, products: Tensor, dproducts: Tensor, drows: Tensor, dkeys: Tensor, da: Tensor | None) -> Tensor:
        assert da is not None
        return self.tree_gradient(dproducts, drows, dkeys, (self.a * da).mT.unsqueeze(1))

    def tree_gradient(self, dproducts: Tensor, drows: Tensor, dkeys: Tensor, dlog: Tensor) -> Tensor:
        """Do the same as `gradient`, given the gradient `dlog` of log a (B 1 1 d): walk from root to leaves."""
        for joint in reversed(self.joints):
            dlog = joint.gradient(off_diagonal(dproducts, joint.size).movedim(1, 2), drows, dkeys, dlog)
        # a token's product with itself does not decay; its rounding would stay in differences of sums over pairs
        same = dproducts.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        G = diagonal_blocks(dproducts, self.leaves.size).tril(-1).movedim(1, 2)
        dlog = self.leaves.gradient(G, drows, dkeys, dlog).flatten(1, 2)
        for x, dx, g in zip(self.rows.unbind(1), drows.unbind(1), same.unbind(1), strict=True):
            dx.addcmul_(g, self.keys)
            dkeys.addcmul_(g, x)
        return dlog


@final
class _Joint:
    """The m pairs of 2m neighbouring blocks of s tokens. `since` (B g C d) are all rows, decayed since their block
    began, and `until` (B C d) all keys, decayed until it ends; both are changed in place, to blocks of a pair each.
    `rows` (B m g s d) and `keys` (B m s d) are copies from before this: rows of second blocks, keys of first ones.
    `decays` (B 2m 1 d) are the decays over the blocks, `decay` (B m 1 d) those over the pairs."""

    def __init__(self, decays: Tensor, since: Tensor, until: Tensor, work: Workspace):
        self.size = since.shape[-2] // decays.shape[1]
        (second, first), (of_first, of_second) = self._sides(since, until), halves(decays)
        self.of_first, self.of_second, self.decay = of_first, of_second, of_first * of_second
        self.rows = work(f"rows{self.size}", second.shape).copy_(second)
        self.keys = work(f"keys{self.size}", first.shape).copy_(first)
        torch.mul(self.rows, of_first.unsqueeze(2), out=second)
        torch.mul(self.keys, of_second, out=first)

    def _sides(self, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """View, of all rows (B g C d) and keys (B C d), the rows of second blocks and the keys of first ones."""
        return halves(as_blocks(rows, self.size))[1].movedim(1, 2), halves(as_blocks(keys, self.size))[0]

    def gradient(self, G: Tensor, drows: Tensor, dkeys: Tensor, dlog: Tensor) -> Tensor:
        """Turn `drows` and `dkeys` in place from the gradients of the changed `since` and `until` into those of the
        original ones. G (B m g s s) is the gradient of the products of `rows` and `keys`, `dlog` that of the pairs' log
        decays. Return the gradient of the log decays of blocks."""
        dsecond, dfirst = self._sides(drows, dkeys)
        dlog_first = self.of_first * (self.rows * dsecond).sum((2, 3)).unsqueeze(-2)
        dlog_second = self.of_second * (self.keys * dfirst).sum(2, keepdim=True)
        of_rows, of_keys = block_products_gradient(self.rows, self.keys, G)
        torch.addcmul(of_rows, dsecond, self.of_first.unsqueeze(2), out=dsecond)
        torch.addcmul(of_keys, dfirst, self.of_second, out=dfirst)
        return torch.stack([dlog_first, dlog_second], 2).add_(dlog.unsqueeze(2)).flatten(1, 2)


@final
class _Tokens:
    """Leaves of one token, with decays alpha (B C 1 d). Write rows times alpha to `since`, and the keys to `until`."""

    size = 1

    def __init__(self, rows: Tensor, keys: Tensor, alpha: Tensor, since: Tensor, until: Tensor, work: Workspace):
        self.rows, self.keys, self.decay = rows, keys, alpha
        torch.mul(rows, alpha.squeeze(2).unsqueeze(1), out=since)
        until.copy_(keys)

    def products(self) -> Tensor:
        return block_products(row_blocks(self.rows, 1), as_blocks(self.keys, 1))

    def gradient(self, G: Tensor, drows: Tensor, dkeys: Tensor, dlog: Tensor) -> Tensor:
        # a loop over heads needs no memory for its terms
        for x, dx in zip(self.rows.unbind(1), drows.unbind(1), strict=True):
            dlog.addcmul_(as_blocks(x, 1), as_blocks(dx, 1).mul_(self.decay))
        return dlog


# tokens per leaf; f at a leaf's first token, and the least f, whose ratio leaves half of the range of float32 to values
# and gradients; the least decay of one token
LEAF, FIRST, LEAST, STRONGEST = 16, 2.0**25, 2.0**-25, 2.0**-8


@final
class _Leaves:
    """Leaves of s = 2 to 16 tokens, with decays alpha (B m s d). Let f_i be the product of α_t from the leaf's second
    token to token i, times a constant: D_ij = f_i / f_j, so P = tril((f ∘ rows) (keys / f)ᵀ). Write the rows, decayed
    since their leaf began, to `since`, and keys, decayed until it ends, to `until`.

    A decay may take f below its range: the rows of a leaf, from that token on, are then computed by the tree `exact`,
    whose leaves are single tokens. So a row depends on no later token, not even in its rounding."""

    def __init__(self, rows: Tensor, keys: Tensor, alpha: Tensor, since: Tensor, until: Tensor, work: Workspace):
        self.size, self.work, self.exact = alpha.shape[-2], work, None
        rows, since = (row_blocks(x, self.size) for x in (rows, since))
        keys, until = (as_blocks(x, self.size) for x in (keys, until))
        f = self.f = work("f", alpha.shape)
        f[..., :1, :] = FIRST
        weak_alpha = alpha if alpha.amin() >= STRONGEST else F.threshold(alpha, STRONGEST, 0)
        for (before, x), a in zip(pairwise(f.unbind(-2)), weak_alpha.unbind(-2)[1:], strict=True):
            torch.mul(before, a, out=x)
        self.first, self.last = alpha[..., :1, :] / FIRST, f[..., -1:, :]
        self.rows = torch.mul(rows, f.unsqueeze(2), out=work("leaf_rows", rows.shape))
        self.keys = torch.div(keys, f, out=work("leaf_keys"))
        torch.mul(self.rows, self.first.unsqueeze(2), out=since)
        torch.mul(self.keys, self.last, out=until)
        self.decay = self.first * self.last
        # a NaN is not above anything either
        if not self.last.amin() >= LEAST:
            weak = (f >= LEAST).all(-1)
            self.at = (~weak[..., -1]).nonzero(as_tuple=True)
            self.weak = weak[self.at][:, None, :, None]
            self.exact = PerChannel(rows[self.at], keys[self.at], alpha[self.at], work, 1)
            since[self.at] = torch.where(self.weak, since[self.at], self.exact.rows_since_start)
            until[self.at], self.decay[self.at] = self.exact.keys_until_end, self.exact.a.mT

    def products(self) -> Tensor:
        products = block_products(self.rows, self.keys).tril_()
        if self.exact is not None:
            products[self.at] = torch.where(self.weak, products[self.at], self.exact.products())
        return products

    def gradient(self, G: Tensor, drows: Tensor, dkeys: Tensor, dlog: Tensor) -> Tensor:
        drows, dkeys = row_blocks(drows, self.size), as_blocks(dkeys, self.size)
        if self.exact is None:
            return self._gradient(G, drows, dkeys, dlog)
        of_rows, of_keys = drows[self.at], dkeys[self.at]
        of_decays = self.exact.tree_gradient(G[self.at], of_rows, of_keys, dlog[self.at].unsqueeze(1))
        dlog = self._gradient(G, drows, dkeys, dlog)
        dlog[self.at], drows[self.at], dkeys[self.at] = of_decays, of_rows, of_keys
        return dlog

    def _gradient(self, G: Tensor, drows: Tensor, dkeys: Tensor, dlog_leaf: Tensor) -> Tensor:
        dlog = torch.zeros_like(dkeys)
        # a loop over heads needs no memory for its terms
        for x, dx in zip(self.rows.unbind(2), drows.unbind(2), strict=True):
            dlog.addcmul_(x, dx.mul_(self.first))
        dlog_first = dlog_leaf + dlog.sum(-2, keepdim=True)
        until = torch.mul(self.keys, dkeys.mul_(self.last), out=self.work("until"))
        of_rows, of_keys = block_products_gradient(self.rows, self.keys, G)
        dlog.add_(torch.mul(self.rows, of_rows, out=self.work("scratch")).sum(2)).addcmul_(self.keys, of_keys, value=-1)
        drows.add_(of_rows).mul_(self.f.unsqueeze(2))
        dkeys.add_(of_keys).div_(self.f)
        # in a third of the time of torch's cumsum
        for later, x in pairwise(dlog.unbind(-2)[::-1]):
            x.add_(later)
        for before, x in pairwise(until.unbind(-2)):
            x.add_(before)
        dlog[..., 1:, :] += dlog_leaf + until[..., :-1, :]
        dlog[..., :1, :] = dlog_first
        return dlog
