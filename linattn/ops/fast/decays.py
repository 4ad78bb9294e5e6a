"""Products inside chunks under a decay per head or per channel, and their gradients.

`asking` (B r C d) are queries, and keys under the delta rule; they meet keys, which are `written` (B C d). Decays are
(B C 1) or (B C d). Each kind holds `asking_in`, since the chunk began, the token's own decay included, `written_out`,
until the chunk ends, `over`, what decays over the chunk, (B e 1), and `products` (B r C C), those of asking_i and
written_j with what decays between them for j ≤ i, else 0. Its `gradient` turns the gradients of the first two into
those of `asking` and `written`, in place, given also that of `over`, and returns that of the decays' logarithms, which
is a sum over what crosses each token.

Decays per channel are those of Yang et al., Gated Linear Attention, https://arxiv.org/abs/2312.06635."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.fast.block_tree import corners, diagonal, halves, in_blocks
from linattn.ops.fast.blocks import Workspace

# in leaves of so many tokens decays of −RANGE and more are divided by: factors are between 2^−58 and 2^58, and times
# queries, keys and gradients they are far from the ends of float32's range
LEAF, RANGE, UNIT = 16, 5.3, 2.0**58


def decayed_products(
    asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace, number: int
) -> "PerHead | PerChannel | FromStrongDecays":
    """Return the products under the kind of decay that is given, of `number` chunks per sequence. The decays are
    overwritten."""
    if log_decay.shape[-1] == 1:
        return PerHead(asking, written, log_decay, work)
    # another device would have to wait for what it is asked
    size = min(LEAF, log_decay.shape[-2]) if log_decay.device.type == "cpu" and log_decay.numel() else 1
    # a NaN is not above anything, nor can it be divided by
    if size == 1 or log_decay.amin() >= -RANGE:
        return PerChannel(asking, written, log_decay, work, size)
    strong = ~(log_decay >= -RANGE).all(-1).unflatten(0, (number, -1))
    return FromStrongDecays(asking, written, log_decay, work, strong)


@dataclass
class NoDecay:
    """The products of `inside.py` where nothing decays."""

    asking_in: Tensor
    written_out: Tensor
    work: Workspace
    over: None = None

    @cached_property
    def products(self) -> Tensor:
        products = torch.bmm(self.asking_in.flatten(1, 2), self.written_out.mT, out=self.work("products"))
        return products.view(*self.asking_in.shape[:-1], self.asking_in.shape[-2]).tril_()

    def gradient(self, dproducts: Tensor, dasking: Tensor, dwritten: Tensor, dover: Tensor | None) -> None:
        G = dproducts.tril_().flatten(1, 2)
        dasking.flatten(1, 2).baddbmm_(G, self.written_out)
        dwritten.baddbmm_(G.mT, self.asking_in.flatten(1, 2))


class PerHead:
    def __init__(self, asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace):
        self.asking, self.written, self.work = asking, written, work
        self.between, since, until = decay_weights(log_decay)
        self.since, self.until = since.squeeze(1), until.squeeze(1)
        self.over = self.since[:, -1:]
        self.asking_in = torch.mul(asking, since, out=work("asking_in"))
        self.written_out = torch.mul(written, self.until, out=work("written_out"))

    @cached_property
    def products(self) -> Tensor:
        products = torch.bmm(self.asking.flatten(1, 2), self.written.mT, out=self.work("products"))
        # what must not be seen is overwritten, not multiplied by zero: it may be infinite
        return products.view(*self.asking.shape[:-1], self.asking.shape[-2]).mul_(self.between).tril_()

    def gradient(self, dproducts: Tensor, dasking: Tensor, dwritten: Tensor, dover: Tensor | None) -> Tensor:
        assert dover is not None
        dasking.mul_(self.since.unsqueeze(1))
        dwritten.mul_(self.until)
        since = torch.mul(self.asking, dasking, out=self.work("scratch")).sum(-1).sum(1)
        until = torch.mul(self.written, dwritten, out=self.work("scratch")).sum(-1)
        pairs = torch.mul(dproducts, self.products, out=self.work("scratch")).sum(1)
        G = dproducts.mul_(self.between).tril_().flatten(1, 2)
        dasking.flatten(1, 2).baddbmm_(G, self.written)
        dwritten.baddbmm_(G.mT, self.asking.flatten(1, 2))
        dlog_decay = sum_crossing(pairs, since.unsqueeze(-1), until.unsqueeze(-1))
        return dlog_decay + self.over * dover.sum((1, 2), keepdim=True)


def decay_weights(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what decays between tokens of chunks, (B 1 C C), since they began and until they end, (B 1 C 1), given
    (B C 1). Logarithms are summed in float64, so that differences of long sums stay exact; −inf starts a sequence."""
    log_decay, dtype = log_decay.mT, log_decay.dtype
    exact = torch.float32 if log_decay.device.type == "mps" else torch.float64
    fresh = log_decay == -torch.inf
    # on a CPU torch's exp2 takes a fifth of the time of exp
    total = log_decay.to(exact).masked_fill(fresh, 0).cumsum(-1).mul_(math.log2(math.e)).unsqueeze(-1)
    inside = (total - total.mT).to(dtype).exp2_().tril_()
    since, until = (x.to(dtype).exp2() for x in (total, total[..., -1:, :] - total))
    if log_decay.device.type != "cpu" or fresh.any():
        count = fresh.cumsum(-1).unsqueeze(-1)
        inside.mul_(count == count.mT)
        since.mul_(count == 0)
        until.mul_(count[..., -1:, :] == count)
    return inside, since, until


def sum_crossing(pairs: Tensor, Q: Tensor, K: Tensor) -> Tensor:
    """Sum the `pairs` (cb C C) that cross each token, i ≥ t > j, Q_i (cb C 1) over i ≥ t, for the state before the
    chunk, and K_j (cb C 1) over j < t, for the state after it. A difference of sums over all pairs, or all keys, would
    leave their rounding where decays are strong."""
    before = Q + pairs @ pairs.new_ones(pairs.shape[1:]).triu(1)
    return before.tril().sum(1).unsqueeze(-1) + F.pad(K[:, :-1].cumsum(1), (0, 0, 1, 0))


class _Level(NamedTuple):
    """Blocks of `size` tokens meet: those that ask, (B m r s d), and those written, (B m s d), decayed since or until
    their border; and what decays over each block, (B 2m 1 d)."""

    size: int
    asking: Tensor
    written: Tensor
    over: Tensor


class PerChannel:
    """A chunk is cut into leaves of `size` tokens, which are joined two by two again and again. A query and a key of
    different leaves are in two neighbouring blocks of s tokens for exactly one s, and what decays between them is what
    decays from the key until the border times what decays since the border: no factor is above 1. Inside a leaf it is
    f_i / f_j, with f what decays after its first token, times UNIT. Leaves of one token divide by nothing, and serve
    decays of any strength."""

    def __init__(self, asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace, size: int):
        self.asking, self.written, self.work, self.levels = asking, written, work, list[_Level]()
        # on a CPU torch's exp2 takes a fifth of the time of exp
        self.first = in_blocks(log_decay.mul_(math.log2(math.e)).exp2_(), size)
        view = in_blocks(asking, size).movedim(1, 2)
        self.asking_in, self.written_out = work("asking_in", asking.shape), work("written_out", written.shape)
        if size > 1:
            self._divide(view, in_blocks(written, size))
        else:
            self.leaves = _Level(size, view, written.unsqueeze(-2), self.first)
            self.written_out.copy_(written)
        torch.mul(self.leaves.asking, self.first.unsqueeze(2), out=in_blocks(self.asking_in, size).movedim(1, 2))
        over = self.leaves.over
        while size < asking.shape[-2]:
            over = self._double(size, over)
            size *= 2
        self.over = over.squeeze(1).mT

    def _divide(self, asking: Tensor, written: Tensor) -> None:
        """Take leaves apart, given the decays of their tokens as `first`."""
        self.since, work, size = self.first, self.work, written.shape[-2]
        self.first = self.since[..., :1, :] / UNIT
        self.since[..., :1, :] = UNIT
        for before, x in pairwise(self.since.unbind(-2)):
            x.mul_(before)
        last = self.since[..., -1:, :]
        asking = torch.mul(asking, self.since.unsqueeze(2), out=work("leaves_asking", asking.shape))
        written = torch.div(written, self.since, out=work("leaves_written"))
        torch.mul(written, last, out=in_blocks(self.written_out, size))
        self.leaves = _Level(size, asking, written, self.first * last)

    @cached_property
    def products(self) -> Tensor:
        products = self.work("products", (*self.asking.shape[:-1], self.asking.shape[-2])).zero_()
        diagonal(products, self.leaves.size).copy_(_meeting(self.leaves).tril_().movedim(2, 1))
        for level in self.levels:
            corners(products, level.size).copy_(_meeting(level).movedim(2, 1))
        return products

    def _double(self, size: int, over: Tensor) -> Tensor:
        (second, first), work = self._sides(self.asking_in, self.written_out, size), self.work
        level = _Level(size, work(f"second{size}", second.shape), work(f"first{size}", first.shape), over)
        level.asking.copy_(second)
        level.written.copy_(first)
        self.levels.append(level)
        over_first, over_second = halves(over)
        torch.mul(level.asking, over_first.unsqueeze(2), out=second)
        torch.mul(level.written, over_second, out=first)
        return over_first * over_second

    def _sides(self, asking: Tensor, written: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """View the second blocks as (B m r s d) and the first as (B m s d)."""
        return halves(in_blocks(asking, size))[1].movedim(1, 2), halves(in_blocks(written, size))[0]

    def gradient(self, dproducts: Tensor, dasking: Tensor, dwritten: Tensor, dover: Tensor | None) -> Tensor:
        assert dover is not None
        dlog_over = (self.over * dover).mT.unsqueeze(1)
        for level in reversed(self.levels):
            dlog_over = self._halve(level, corners(dproducts, level.size), dasking, dwritten, dlog_over)
        # a token's product with itself does not decay; its rounding would stay in differences of sums over pairs
        same = dproducts.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        G = diagonal(dproducts, self.leaves.size).tril(-1)
        dlog_decay = self._of_leaves(G, dasking, dwritten, dlog_over)
        for asking, dx, g in zip(self.asking.unbind(1), dasking.unbind(1), same.unbind(1), strict=True):
            dx.addcmul_(g, self.written)
            dwritten.addcmul_(g, asking)
        return dlog_decay

    def _of_leaves(self, G: Tensor, dasking: Tensor, dwritten: Tensor, dlog_over: Tensor) -> Tensor:
        """Return the gradients of the logarithms of decays, given those of `over` and of products of two tokens."""
        size, asking, written, _ = self.leaves
        dasking, dwritten = in_blocks(dasking, size).movedim(1, 2), in_blocks(dwritten, size)
        dlog = dlog_over if size == 1 else torch.zeros_like(dwritten)
        # a loop over heads needs no memory for its terms
        for x, dx in zip(asking.unbind(2), dasking.unbind(2), strict=True):
            dlog.addcmul_(x, dx.mul_(self.first))
        if size == 1:
            return dlog.flatten(1, 2)
        dlog_first = dlog_over + dlog.sum(-2, keepdim=True)
        until = torch.mul(written, dwritten.mul_(self.since[..., -1:, :]), out=self.work("until"))
        through_asking, through_written = _meeting_gradient(self.leaves, G.movedim(1, 2))
        dlog.add_(torch.mul(asking, through_asking, out=self.work("scratch")).sum(2))
        dlog.addcmul_(written, through_written, value=-1)
        dasking.add_(through_asking).mul_(self.since.unsqueeze(2))
        dwritten.add_(through_written).div_(self.since)
        sum_up(dlog.unbind(-2)[::-1])
        sum_up(until.unbind(-2))
        dlog[..., 1:, :] += dlog_over + until[..., :-1, :]
        dlog[..., :1, :] = dlog_first
        return dlog.flatten(1, 2)

    def _halve(self, level: _Level, G: Tensor, dasking: Tensor, dwritten: Tensor, dlog_over: Tensor) -> Tensor:
        """Go back from blocks of 2s tokens to those of s; return the gradients of the logarithms of `over`."""
        (dsecond, dfirst), (over_first, over_second) = self._sides(dasking, dwritten, level.size), halves(level.over)
        dlog_first = over_first * (level.asking * dsecond).sum((2, 3)).unsqueeze(-2)
        dlog_second = over_second * (level.written * dfirst).sum(2, keepdim=True)
        through_second, through_first = _meeting_gradient(level, G.movedim(1, 2))
        torch.addcmul(through_second, dsecond, over_first.unsqueeze(2), out=dsecond)
        torch.addcmul(through_first, dfirst, over_second, out=dfirst)
        return torch.stack([dlog_first, dlog_second], 2).add_(dlog_over.unsqueeze(2)).flatten(1, 2)


class FromStrongDecays:
    """The rows of a sequence have leaves of one token from the first decay on that is too strong for larger ones. So
    they depend on no later token, not even in their rounding. One form has all chunks, and the other those, `at`, of
    which it has rows. Given is which tokens have `strong` decays, (c b C)."""

    def __init__(self, asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace, strong: Tensor):
        count, _, chunk = strong.shape
        rows = (strong.movedim(0, 1).flatten(1).cumsum(1) > 0).unflatten(1, (count, chunk)).movedim(1, 0).flatten(0, 1)
        chunks, leaf = rows.any(-1), min(LEAF, chunk)
        most_strong = bool(2 * chunks.sum() > len(chunks))
        rows, chunks = rows != most_strong, chunks != most_strong
        self.at = at = rows.any(-1).nonzero().squeeze(-1)
        self.rows, self.chunks = rows[at, None, :, None], chunks[at, None, None]
        some = asking[at], written[at], log_decay[at]
        self.some = PerChannel(*some, work.apart("some"), leaf if most_strong else 1)
        self.all = PerChannel(asking, written, log_decay, work, 1 if most_strong else leaf)
        self.asking_in = self._joined(self.rows, self.all.asking_in, self.some.asking_in)
        self.written_out = self._joined(self.chunks, self.all.written_out, self.some.written_out)
        self.over = self._joined(self.chunks, self.all.over, self.some.over)

    @cached_property
    def products(self) -> Tensor:
        return self._joined(self.rows, self.all.products, self.some.products)

    def _joined(self, where: Tensor, every: Tensor, some: Tensor) -> Tensor:
        """Put `some` where it counts into what `every` chunk has."""
        return every.index_copy_(0, self.at, torch.where(where, some, every[self.at]))

    def gradient(self, dproducts: Tensor, dasking: Tensor, dwritten: Tensor, dover: Tensor | None) -> Tensor:
        assert dover is not None
        if not self.chunks.any():
            return self.all.gradient(dproducts, dasking, dwritten, dover)
        upstream = tuple(x[self.at] for x in (dproducts, dasking, dwritten, dover))
        of_some = self.some.gradient(*upstream)
        dlog_decay = self.all.gradient(dproducts, dasking, dwritten, dover)
        self._joined(self.chunks.unsqueeze(1), dasking, upstream[1])
        self._joined(self.chunks, dwritten, upstream[2])
        return self._joined(self.chunks, dlog_decay, of_some)


def sum_up(tokens: Sequence[Tensor]) -> None:
    """Add to each token those before it, in place, in a third of the time of torch's cumsum."""
    for before, x in pairwise(tokens):
        x.add_(before)


def _meeting(level: _Level) -> Tensor:
    """Return the products of blocks that ask and those written, (B m r s s)."""
    # products of matrices as small as 1 take longer than elementwise ones
    if level.size == 1:
        return (level.asking * level.written.unsqueeze(2)).sum(-1, keepdim=True)
    return (level.asking.flatten(2, 3) @ level.written.mT).view(*level.asking.shape[:-1], level.size)


def _meeting_gradient(level: _Level, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of blocks that ask and those written, given that of their products."""
    if level.size == 1:
        return G * level.written.unsqueeze(2), (G * level.asking).sum(2)
    G = G.flatten(2, 3)
    return (G @ level.written).view(level.asking.shape), G.mT @ level.asking.flatten(2, 3)
