"""Products inside the chunks of a segment under each kind of decay: none, per head, per channel, and their gradients.

`asking` (B r C d) are queries and keys, `written` (B C d) keys times β, `log_decay` (B C 1) or (B C d). Each kind holds
`asking_in`, since the chunk began, the token's own decay included, `written_out`, until the chunk ends, `over`, what
decays over the chunk, (B e 1), and `products` (B r C C), those of asking_i and written_j with what decays between them
for j ≤ i, else 0. Its `gradient` turns the gradients of the first two into those of `asking` and `written`, in place,
and returns that of `log_decay`. A key's product with itself means nothing, and must have no gradient.

No logarithms are subtracted from one another and no factor is above 1, so a decay of −∞ needs no care: it is zero."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.delta.halves import between, corners, halves, in_blocks
from linattn.ops.backends.workspace import Workspace


class NoDecay:
    over = None

    def __init__(self, asking: Tensor, written: Tensor, work: Workspace):
        self.asking = self.asking_in = asking
        self.written = self.written_out = written
        self.products = _products(asking, written, work).tril_()

    def gradient(self, dproducts: Tensor, dasking: Tensor, dwritten: Tensor, dover: Tensor) -> None:
        _of_products(dproducts.tril_(), self, dasking, dwritten)


class PerHead:
    def __init__(self, asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace):
        self.asking, self.written, self.work = asking, written, work
        decay = log_decay.exp()
        D = between(decay)
        self.since, self.until, self.between = D[..., :1] * decay[:, :1], D[:, -1:].mT, D.unsqueeze(1)
        self.over = self.since[:, -1:]
        self.asking_in = torch.mul(asking, self.since.unsqueeze(1), out=work("asking_in"))
        self.written_out = torch.mul(written, self.until, out=work("written_out"))
        self.products = _products(asking, written, work).mul_(self.between)

    def gradient(self, dproducts: Tensor, dasking: Tensor, dwritten: Tensor, dover: Tensor) -> Tensor:
        dasking.mul_(self.since.unsqueeze(1))
        dwritten.mul_(self.until)
        since = torch.mul(self.asking, dasking, out=self.work("scratch")).sum((1, 3))
        until = torch.mul(self.written, dwritten, out=self.work("scratch")).sum(-1)
        # the pairs that cross each token, i ≥ t > j
        pairs = (dproducts * self.products).sum(1)
        later = pairs.new_ones(pairs.shape[-2:]).triu()
        crossing = (pairs @ later.triu(1)).tril().sum(1)
        _of_products(dproducts.mul_(self.between), self, dasking, dwritten)
        dlog_decay = crossing + since @ later.mT + until @ later.triu(1)
        return dlog_decay.unsqueeze(-1) + self.over * dover.sum((1, 2), keepdim=True)


class _Level(NamedTuple):
    """Blocks of `size` tokens meet: the second of each two, (B m r s d), and the first, (B m s d), decayed since or
    until their border; and what decays over each block, (B 2m 1 d)."""

    size: int
    second: Tensor
    first: Tensor
    over: Tensor


class PerChannel:
    """A chunk is halved again and again. A query and a key are in two neighbouring blocks of s tokens for exactly one
    s, and what decays between them is what decays from the key until the border times what decays since the border."""

    def __init__(self, asking: Tensor, written: Tensor, log_decay: Tensor, work: Workspace):
        self.asking, self.written, self.work, self.levels = asking, written, work, list[_Level]()
        self.decay = log_decay.exp_()
        self.asking_in = torch.mul(asking, self.decay.unsqueeze(1), out=work("asking_in"))
        self.written_out = work("written_out", written.shape).copy_(written)
        self.products = work("products", (*asking.shape[:-1], asking.shape[-2])).zero_()
        self.products[:, :-1].diagonal(dim1=-2, dim2=-1).copy_((asking[:, :-1] * written.unsqueeze(1)).sum(-1))
        over, size = self.decay.unsqueeze(-2), 1
        while size < asking.shape[-2]:
            over = self._double(size, over)
            size *= 2
        self.over = over.squeeze(1).mT

    def _double(self, size: int, over: Tensor) -> Tensor:
        (second, first), work = self._sides(self.asking_in, self.written_out, size), self.work
        level = _Level(size, work(f"second{size}", second.shape), work(f"first{size}", first.shape), over)
        level.second.copy_(second)
        level.first.copy_(first)
        self.levels.append(level)
        corners(self.products, size).copy_(_meeting(level).movedim(2, 1))
        over_first, over_second = halves(over)
        torch.mul(level.second, over_first.unsqueeze(2), out=second)
        torch.mul(level.first, over_second, out=first)
        return over_first * over_second

    def _sides(self, asking: Tensor, written: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """View the second blocks as (B m r s d) and the first as (B m s d)."""
        return halves(in_blocks(asking, size))[1].movedim(1, 2), halves(in_blocks(written, size))[0]

    def gradient(self, dproducts: Tensor, dasking: Tensor, dwritten: Tensor, dover: Tensor) -> Tensor:
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
        dlog_first = over_first * (level.second * dsecond).sum((2, 3)).unsqueeze(-2)
        dlog_second = over_second * (level.first * dfirst).sum(2, keepdim=True)
        through_second, through_first = _meeting_gradient(level, G.movedim(1, 2))
        torch.addcmul(through_second, dsecond, over_first.unsqueeze(2), out=dsecond)
        torch.addcmul(through_first, dfirst, over_second, out=dfirst)
        return torch.stack([dlog_first, dlog_second], 2).add_(dlog_over.unsqueeze(2)).flatten(1, 2)


def _meeting(level: _Level) -> Tensor:
    """Return the products of second and first blocks, (B m r s s). Those of matrices as small as 1 are more work."""
    if level.size == 1:
        return (level.second * level.first.unsqueeze(2)).sum(-1, keepdim=True)
    return (level.second.flatten(2, 3) @ level.first.mT).view(*level.second.shape[:-1], level.size)


def _meeting_gradient(level: _Level, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of second and first blocks, given that of their products."""
    if level.size == 1:
        return G * level.first.unsqueeze(2), (G * level.second).sum(2)
    G = G.flatten(2, 3)
    return (G @ level.first).view(level.second.shape), G.mT @ level.second.flatten(2, 3)


def _products(asking: Tensor, written: Tensor, work: Workspace) -> Tensor:
    return torch.bmm(asking.flatten(1, 2), written.mT, out=work("products")).unflatten(1, asking.shape[1:3])


def _of_products(G: Tensor, s: NoDecay | PerHead, dasking: Tensor, dwritten: Tensor) -> None:
    dasking.flatten(1, 2).baddbmm_(G.flatten(1, 2), s.written)
    dwritten.baddbmm_(G.flatten(1, 2).mT, s.asking.flatten(1, 2))
