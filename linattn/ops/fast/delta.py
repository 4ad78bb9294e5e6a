"""Matrix products inside chunks of tokens, a running state between them: the form for training and prefill. Yang et
al., https://arxiv.org/abs/2406.06484, section 3.2, the WY form.

Token t writes β_t k_t e_tᵀ, where e_t is v_t less what the decayed state before t says at k_t. So keys ask as queries
do, and what they are told is taken off the values. With what decays between tokens in
[P, A] = [tril(q (β k)ᵀ), tril(k (β k)ᵀ, −1)], since the chunk began in [Q⁺, K⁺], and until it ends in K⁻:

    E = V − A E − K⁺ S        y = P E + Q⁺ S        S ← a S + K⁻ᵀ E

Shapes: a segment has c chunks, of C tokens, of b states, B = c b, and g queries share a state."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.ops.calls import DeltaCall
from linattn.ops.fast.block_tree import inverse
from linattn.ops.fast.blocks import Place, Sizes, Workspace, beside_tokens, empty_like
from linattn.ops.fast.decays import decayed_products
from linattn.ops.fast.linear import NoDecay

# half of the products inside a chunk is thrown away, so short chunks save work; their states cost memory traffic
SHORTEST, LONGEST = 16, 32
# numbers of a segment's keys or values: a megabyte in float32; segments of fewer tokens would save a state too often
BLOCK, SEGMENT = 2**18, 64


def forward(call: DeltaCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last state and, if `save`, the states that enter each segment, (i b d dv), and E
    and [P, A, M] of all chunks, (c b C dv) and (c b g+2 C C)."""
    results, work = empty(call, save), Workspace(call.S)
    y, S_end, S_saved, E_saved, kept = results
    given, (y_view,) = arrange(call, y)
    S_end = S_end.view(given.S.shape)
    for states, places in sizes(call).cut(call.S.shape[:-2], call.q.shape[-2]):
        S = given.S[states]
        for i, place in enumerate(places):
            if save:
                S_saved[i, states] = S
            segment = Segment(given, place, work)
            if save:
                segment.keep(of_chunks(kept, place, states))
                E = of_chunks(E_saved, place, states)
            else:
                E = work("E", (len(S), place.chunk, S.shape[-1])).expand(place.number, -1, -1, -1)
            y_part, S = segment.run(place.chunks(given.v), S, E)
            place.write(y_view, y_part)
        S_end[states] = S
    return results


def empty(call: DeltaCall, save: bool) -> tuple[Tensor, ...]:
    """Return results without numbers."""
    *lead, d, dv = call.S.shape
    y, n = empty_like(call.v, (*call.q.shape[:-1], dv)), call.q.shape[-2] if save else 0
    states = call.S.new_empty(sizes(call).count(n), math.prod(lead), d, dv)
    chunk, sharing = sizes(call).chunk, math.prod(q for q, k in zip(call.q.shape, lead, strict=False) if q != k)
    chunks = -(-n // chunk), math.prod(lead)
    saved = (empty_like(call.S, (*chunks, *shape)) for shape in ((chunk, dv), (sharing + 2, chunk, chunk)))
    return y, call.S.new_empty(call.S.shape), states, *saved


def of_chunks(saved: Tensor, place: Place, states: slice) -> Tensor:
    """View a segment's part of what was saved for all chunks, (c b … C e). A last chunk may have fewer rows."""
    first = place.start // saved.shape[-2]
    return saved[first : first + place.number, states, ..., : place.chunk, :]


def sizes(call: DeltaCall) -> Sizes:
    """Choose sizes of segments whose keys fit the cache."""
    *lead, d, dv = call.S.shape
    rows, chunk = lead[0] if lead else 1, SHORTEST if min(d, dv) <= LONGEST else LONGEST
    block = BLOCK // max(1, math.prod(call.q.shape[:-2]) // max(1, rows) * max(d, dv))
    step = max(1, min(rows, block // SEGMENT))
    return Sizes(step, max(SEGMENT, block // step // SEGMENT * SEGMENT), chunk, True)


def arrange(call: DeltaCall, *outputs: Tensor) -> tuple[DeltaCall, list[Tensor]]:
    """View q and outputs as (*b *g n d), what belongs to keys as (*b n d), and the states as (b d dv), with one leading
    dimension at least."""
    lead, beside = call.S.shape[:-2] or (1,), [call.q, *outputs]
    if call.S.ndim == 2:
        beside = [x.unsqueeze(0) for x in beside]
    q, *others = (beside_tokens(x, lead, beside[0].shape) for x in beside)
    k, v, beta, log_decay = (
        None if x is None else x.expand(*lead, *x.shape[-2:]) for x in (call.k, call.v, call.beta, call.log_decay)
    )
    assert k is not None and v is not None and beta is not None
    S = call.S.reshape(math.prod(lead), *call.S.shape[-2:])
    return DeltaCall(q, k, v, beta, S, log_decay, call.scale), others


class Segment:
    """Hold what follows from the queries, keys, β and decays of one segment. `asking` (B g+1 C d) is scaled queries
    and, last, keys; `written` is keys times β (B C 1), and M = (1 + A)⁻¹."""

    def __init__(self, given: DeltaCall, place: Place, work: Workspace, kept: Tensor | None = None):
        q, k, self.place, self.work = place.chunks(given.q), place.chunks(given.k), place, work
        self.scale = given.scale
        groups, (chunk, d) = math.prod(q.shape[place.lead + 1 : -2]), k.shape[-2:]
        self.asking = work("asking", (math.prod(k.shape[:-2]), groups + 1, chunk, d))
        # a number would be multiplied in the dtype of q
        torch.mul(q, given.S.new_full((1,), given.scale), out=self.asking[:, :-1].view(q.shape))
        keys = self.asking[:, -1]
        keys.view(k.shape).copy_(k)
        self.beta = place.load(given.beta, "beta", work)
        self.written = torch.mul(keys, self.beta, out=work("written"))
        if given.log_decay is None:
            self.inside = NoDecay(self.asking, self.written, work)
        else:
            log_decay = place.load(given.log_decay, "log_decay", work)
            self.inside = decayed_products(self.asking, self.written, log_decay, work, place.number)
        self.asking_in, self.k_out = self.inside.asking_in.flatten(1, 2), self.inside.written_out
        if kept is not None:
            kept = kept[..., :chunk].flatten(0, 1)
            self.inside.products, self.M = kept[:, :-1], kept[:, -1]
        else:
            self.M = inverse(self.inside.products[:, -1], work("M"))
        self.P = self.inside.products[:, :-1].flatten(1, 2)

    def keep(self, kept: Tensor) -> None:
        """Write [P, A, M] where the gradient finds them."""
        kept = kept[..., : self.place.chunk]
        for x, part in ((self.inside.products, kept[:, :, :-1]), (self.M, kept[:, :, -1])):
            part.copy_(x.unflatten(0, part.shape[:2]))

    def run(self, v: Tensor, S: Tensor, E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (B gC dv) and the last state, given V (c *b C dv) and the first. Write E (c b C dv)."""
        (count, _, chunk, _), dv = self.asking.shape, v.shape[-1]
        y = self.work("y", (count, self.P.shape[1], dv))
        S = self.work("S", S.shape).copy_(S)
        told = self.work("told", (len(S), self.asking_in.shape[1], dv))
        told_queries, told_keys = told[:, :-chunk], told[:, -chunk:].view(v.shape[1:])
        rest = self.work("rest", (len(S), chunk, dv))
        parts = map(self.place.each, (y, self.M, self.P, self.asking_in, self.k_out.mT))
        for v_part, e, a, y_part, M, P, asking, k_out in zip(v, E, self.over(), *parts, strict=True):
            # one product for queries and keys
            torch.bmm(asking, S, out=told)
            torch.sub(v_part, told_keys, out=rest.view(told_keys.shape))
            torch.bmm(M, rest, out=e)
            torch.baddbmm(told_queries, P, e, out=y_part)
            (S if a is None else S.mul_(a)).baddbmm_(k_out, e)
        return y, S

    def again(self, E: Tensor, S: Tensor) -> Tensor:
        """Return the states that enter the chunks, (B d dv), given E."""
        S_ends = self.ends("S", S, 0)
        torch.bmm(self.k_out.mT, E, out=S_ends[1:].flatten(0, 1))
        for before, after, a in zip(S_ends, S_ends[1:], self.over(), strict=False):
            add(after, before, a)
        return S_ends[:-1].flatten(0, 1)

    def ends(self, name: str, S: Tensor, at: int) -> Tensor:
        """Return memory for the states at the ends of all chunks, (c+1 b d dv), one of which is S."""
        ends = self.work(name, (self.place.number + 1, *S.shape))
        ends[at] = S
        return ends

    def over(self) -> Sequence[Tensor | None]:
        """Return what decays over each chunk."""
        return [None] * self.place.number if self.inside.over is None else self.place.each(self.inside.over)


def add(total: Tensor, S: Tensor, decay: Tensor | None) -> Tensor:
    return total.add_(S) if decay is None else total.addcmul_(S, decay)
