"""Heads that share queries and keys, each with values and a decay of its own, as in Mamba-2. Dao and Gu,
https://arxiv.org/abs/2405.21060, section 6.

What queries and keys are to one another is computed once for all heads h; decays belong to values and outputs:

    A_h = q kᵀ ∘ D_h        y_h = A_h v_h + r_h q S_h        S_h ← a_h S_h + kᵀ (w_h v_h)

D, r, w and a are those of chunked.py. A value has a 1 more, [v, 1], which makes [S, z] one state, with the heads beside
one another, and [numerator, denominator] one output. Shapes: a block has B = c b chunks of C tokens and H heads; e is
the width of [v, 1]."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Place, Workspace, beside_tokens, empty_like
from linattn.ops.fast.decays import decay_weights
from linattn.ops.fast.linear import scan, sizes
from linattn.ops.numerics import infinite_if_none


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last state, and the states that enter each block, (i b f He), if `save`."""
    y, S_end, z_end, saved = empty(call, save)
    given, work = arrange(call), Workspace(call.S)
    y_view, ends = beside_heads(y, call), given.S.flatten(0, -3).clone()
    for rows, places in sizes(given).cut(given.S.shape[:-2], given.q.shape[-2]):
        S = ends[rows]
        for i, place in enumerate(places):
            if save:
                saved[i, rows] = S
            block, b = Block(given, place, work), len(S)
            S_ends = block.states(S)
            part = block.outputs(block.read(S_ends[:-b]))
            part, d = part[..., :-1], denominators(part, call)
            place.write(y_view, part if d is None else part.div_(d))
            S = S_ends[-b:]
        ends[rows] = S
    separate(ends, call, S_end, z_end)
    return y, S_end, z_end, saved


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return results without numbers, of a symbolic length too."""
    given, n = arrange(call), call.q.shape[-2]
    blocks = sizes(given).count(n) if save else 0
    y = empty_like(call.v, (*call.S.shape[:-2], n, call.v.shape[-1]))
    S = given.S.flatten(0, -3)
    return y, *(call.S.new_empty(shape) for shape in (call.S.shape, call.z.shape, (blocks, *S.shape)))


def denominators(part: Tensor, call: CausalCall) -> Tensor | None:
    """The last column of outputs, if they are divided by it."""
    nonnegative = ELEMENTWISE[call.feature_map].nonnegative
    return infinite_if_none(part[..., -1:], nonnegative=nonnegative) if call.normalize else None


def beside_heads(x: Tensor, call: CausalCall) -> Tensor:
    """View (*lead n d) as (*b *H n d): the dimensions of heads that share queries stand beside the tokens."""
    return beside_tokens(x, call.S.shape[:-2], call.q.shape)


def as_heads(x: Tensor, call: CausalCall) -> Tensor:
    """View states (*lead f e) as (*b f *H e)."""
    return beside_heads(x, call).movedim(-2, x.ndim - 2)


def arrange(call: CausalCall) -> CausalCall:
    """View q and k as (*b n f), v as (*b *H n dv), decays as (*b *H n 1) and the mask as (*b n 1); return the state as
    (*b f He)."""
    lead, S = call.S.shape[:-2], torch.cat([call.S, call.z.unsqueeze(-1)], -1)
    assert call.log_decay is not None
    v, log_decay = (beside_heads(x.expand(*lead, -1, -1), call) for x in (call.v, call.log_decay.unsqueeze(-1)))
    S, b = as_heads(S, call).flatten(len(lead) + 1), call.q.shape[:-2]
    mask = None if call.key_mask is None else call.key_mask.unsqueeze(-1).expand(*b, -1, -1)
    return CausalCall(call.q, call.k.expand(*b, -1, -1), v, S, call.z, log_decay, mask, *call[7:])


def separate(ends: Tensor, call: CausalCall, S: Tensor, z: Tensor) -> None:
    """Write states (b f He) to where they belong in S and z."""
    both = S.new_empty(*z.shape, S.shape[-1] + 1)
    heads = as_heads(both, call)
    heads.copy_(ends.view(heads.shape))
    S.copy_(both[..., :-1])
    z.copy_(both[..., -1])


class Weights(NamedTuple):
    """Decays of a block: inside is D (B H C C), since r and until w are (B H C 1), over is a (c b 1 He)."""

    inside: Tensor
    since: Tensor
    until: Tensor
    over: Tensor


class Block:
    """Features (B C f), values (B H C e) and weights of one block in the accumulation dtype, and A."""

    def __init__(self, call: CausalCall, place: Place, work: Workspace):
        phi = ELEMENTWISE[call.feature_map]
        self.place, self.work, self.missing = place, work, None
        self.q, self.k = place.load(call.q, "q", work, phi), place.load(call.k, "k", work, phi)
        self.v = self.values("v", call.v, 1)
        if call.key_mask is not None:
            self.missing = ~place.chunks(call.key_mask).flatten(0, place.lead)
            self.k.masked_fill_(self.missing, 0)
            self.v.masked_fill_(self.missing.unsqueeze(1), 0)
            # what a masked token holds, NaN too, must not reach the gradients of the keys that its query sees
            self.q.masked_fill_(self.missing & ~self.q.sum(-1, keepdim=True).isfinite(), 0)
        assert call.log_decay is not None
        self.weights = self._weights(place.chunks(call.log_decay).to(self.q.dtype))
        self.products = torch.bmm(self.q, self.k.mT, out=work("products"))
        # what a query must not see is overwritten, not multiplied by zero: it may be infinite
        self.A = torch.mul(self.products.unsqueeze(1), self.weights.inside, out=work("A")).tril_()

    def values(self, name: str, x: Tensor, last: int) -> Tensor:
        """Return values (B H C e), the last of which is 1, or outputs' gradients, the last of which is 0."""
        x = self.place.chunks(x)
        found = self.work(name, (*x.shape[:-1], x.shape[-1] + 1))
        found[..., :-1].copy_(x)
        found[..., -1] = last
        return found.view(len(self.q), -1, *found.shape[-2:])

    def _weights(self, log_decay: Tensor) -> Weights:
        """Compute the weights from decays (c *b *H C 1)."""
        rows = self.v.shape[:2]
        inside, since, until = (x.squeeze(1).unflatten(0, rows) for x in decay_weights(log_decay.flatten(0, -3)))
        over = since[:, :, -1].unflatten(0, (self.place.number, len(self.q) // self.place.number))
        over = over.expand(*[-1] * 3, self.v.shape[-1]).flatten(-2).unsqueeze(2)
        return Weights(inside, since, until, over)

    def by_token(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """Multiply (B H C e) by (B H C 1) and return it as (B C He)."""
        count, heads, C, e = x.shape
        found = self.work(name, (count, C, heads, e))
        torch.mul(x.transpose(1, 2), weight.transpose(1, 2), out=found)
        return found.flatten(2)

    def by_head(self, x: Tensor) -> Tensor:
        """View (B C He) as (B H C e)."""
        return x.unflatten(2, (self.v.shape[1], -1)).transpose(1, 2)

    def states(self, S: Tensor) -> Tensor:
        """Return the states at the c + 1 ends of all chunks, (cb+b f He), from those that enter."""
        ends = self.work("S", (len(self.q) + len(S), *S.shape[1:]))
        ends[: len(S)] = S
        self.written = self.by_token(self.v, self.weights.until, "written")
        ends[len(S) :].baddbmm_(self.k.mT, self.written, beta=0)
        scan(ends, self.place, self.weights.over)
        return ends

    def read(self, S_in: Tensor) -> Tensor:
        """q S, (B H C e)"""
        return self.by_head(torch.bmm(self.q, S_in, out=self.work("read")))

    def outputs(self, read: Tensor) -> Tensor:
        """(B H C e)"""
        y = torch.bmm(self.A.flatten(0, 1), self.v.flatten(0, 1), out=self.work("y"))
        return y.view_as(self.v).addcmul_(read, self.weights.since)
