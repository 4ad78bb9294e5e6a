"""Products inside chunks under a decay per head or per channel, and their gradients.

`asking` (B r C d) are queries, and keys under the delta rule; they meet keys, which are `written` (B C d). Decays are
(B C 1) or (B C d). Each kind holds `asking_in`, since the chunk began, the token's own decay included, `written_out`,
until the chunk ends, `over`, what decays over the chunk, (B e 1), and `products` (B r C C), those of asking_i and
written_j with what decays between them for j ≤ i, else 0. Its `gradient` turns the gradients of the first two into
those of `asking` and `written`, in place, given also that of `over`, and returns that of the decays' logarithms, which
is a sum over what crosses each token.

Decays per channel are those of Yang et al., Gated Linear Attention, https://arxiv.org/abs/2312.06635."""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.blocks import Workspace
from linattn.ops.backends.halves import corners, halves, in_blocks


def decayed_products(asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace) -> "PerHead | PerChannel":
    """Return the products under the kind of decay that is given. The decays are overwritten."""
    return (PerHead if log_decay.shape[-1] == 1 else PerChannel)(asking, written, log_decay, work)


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
        since = torch.mul(self.asking, dasking, out=self.work("scratch")).sum((1, 3))
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
    """A chunk is halved again and again. A query and a key are in two neighbouring blocks of s tokens for exactly one
    s, and what decays between them is what decays from the key until the border times what decays since the border. No
    factor is above 1, however strong the decays are, and none depends on later tokens."""

    def __init__(self, asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace):
        self.asking, self.written, self.work, self.levels = asking, written, work, list[_Level]()
        self.decay = log_decay.exp_()
        self.asking_in = torch.mul(asking, self.decay.unsqueeze(1), out=work("asking_in"))
        self.written_out = work("written_out", written.shape).copy_(written)
        over, size = self.decay.unsqueeze(-2), 1
        while size < asking.shape[-2]:
            over = self._double(size, over)
            size *= 2
        self.over = over.squeeze(1).mT

    @cached_property
    def products(self) -> Tensor:
        products = self.work("products", (*self.asking.shape[:-1], self.asking.shape[-2])).zero_()
        products.diagonal(dim1=-2, dim2=-1).copy_((self.asking * self.written.unsqueeze(1)).sum(-1))
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
        dlog_decay, same = dlog_over.squeeze(-2), dproducts.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        # a loop over heads needs no memory for its terms
        for asking, dx, G in zip(self.asking.unbind(1), dasking.unbind(1), same.unbind(1), strict=True):
            dlog_decay.addcmul_(asking, dx.mul_(self.decay))
            dx.addcmul_(G, self.written)
            dwritten.addcmul_(G, asking)
        return dlog_decay

    def _halve(self, level: _Level, G: Tensor, dasking: Tensor, dwritten: Tensor, dlog_over: Tensor) -> Tensor:
        """Go back from blocks of 2s tokens to those of s; return the gradients of the logarithms of `over`."""
        (dsecond, dfirst), (over_first, over_second) = self._sides(dasking, dwritten, level.size), halves(level.over)
        dlog_first = over_first * (level.asking * dsecond).sum((2, 3)).unsqueeze(-2)
        dlog_second = over_second * (level.written * dfirst).sum(2, keepdim=True)
        through_second, through_first = _meeting_gradient(level, G.movedim(1, 2))
        torch.addcmul(through_second, dsecond, over_first.unsqueeze(2), out=dsecond)
        torch.addcmul(through_first, dfirst, over_second, out=dfirst)
        return torch.stack([dlog_first, dlog_second], 2).add_(dlog_over.unsqueeze(2)).flatten(1, 2)


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
