"""The chunked form of the delta rule: matrix products inside chunks of C tokens, a running state S between them. A
block has c chunks of b states, B = c b; g queries share a state, and rows are these queries, then the key. With the
decays D, r, w and a of decays.py, a chunk of queries q, keys k and values V has

    P = tril(q (β k)ᵀ ∘ D)        A = tril(k (β k)ᵀ ∘ D, −1)                intra-chunk
    E = (1 + A)⁻¹ (V − (r k) S)                                             errors of the predictions
    y = P E + (r q) S                                                       outputs
    S ← a S + (w β k)ᵀ E                                                    inter-chunk

Token t adds β_t k_t e_tᵀ to the state, where the error e_t is v_t minus what the decayed state before it predicts for
the key k_t. So keys read the state as queries do, and the predictions that they read are subtracted from the values.
If the call has removal keys, these are the keys that read, and k only those that write.
The form serves training and prefill. Yang et al., https://arxiv.org/abs/2406.06484, section 3.2 (WY)."""

import math

import torch
from torch import Tensor

from linattn.ops.calls import DeltaCall
from linattn.ops.fast.block_tree import inverse
from linattn.ops.fast.blocks import Place, Sizes, Workspace, empty_like, group_view, scan
from linattn.ops.fast.decays import intra_chunk
from linattn.ops.numerics import is_readable
from linattn.ops.plain import delta as plain

# tokens: longer chunks waste products, shorter blocks would save a state too often
LONGEST, SEGMENT = 32, 64


def forward(call: DeltaCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last state and, empty unless `save`, the states that enter each of the i blocks (i b d dv),
    and of all chunks the errors E (c b C dv) and the matrices [P, A, (1 + A)⁻¹] (c b g+2 C C)."""
    results, work = empty(call, save), Workspace(call.S)
    y, S, S_saved, E_saved, matrices = results
    views, (y_view,) = arrange(call, y)
    S = S.view(views.S.shape).copy_(views.S)
    for place in sizes(call).places(call.S.shape[:-2], call.q.shape[-2]):
        rows, block = place.states, Block(views, place, work)
        if save:
            S_saved[place.position, rows] = S[rows]
            block.copy_matrices(saved_view(matrices, place))
            E = saved_view(E_saved, place)
        else:
            E = work("E", (len(S[rows]), place.chunk, S.shape[-1])).expand(place.number, -1, -1, -1)
        place.write(y_view, block.outputs(place.chunks(views.v), S[rows], E))
    # as zero times NaN is NaN, products in a chunk carry one to earlier tokens. It is in the last state, too
    if is_readable(S) and not S.isfinite().all():
        y.copy_(plain.BACKEND.forward(call, False)[0])
    return results


def empty(call: DeltaCall, save: bool) -> tuple[Tensor, ...]:
    """Return uninitialized tensors for the results of `forward`. Works with a symbolic length."""
    *lead, d, dv = call.S.shape
    y, n = empty_like(call.v, (*call.q.shape[:-1], dv)), call.q.shape[-2] if save else 0
    states = call.S.new_empty(sizes(call).count(n), math.prod(lead), d, dv)
    chunk, groups = sizes(call).chunk, math.prod(q for q, k in zip(call.q.shape, lead, strict=False) if q != k)
    chunks = -(-n // chunk), math.prod(lead)
    saved = (empty_like(call.S, (*chunks, *shape)) for shape in ((chunk, dv), (groups + 2, chunk, chunk)))
    return y, call.S.new_empty(call.S.shape), states, *saved


def saved_view(saved: Tensor, place: Place) -> Tensor:
    """View the chunks of the block at `place` in `saved` (c b … C e), which has all chunks. Of a short chunk, of fewer
    than C tokens, the view has only its tokens."""
    first = place.start // saved.shape[-2]
    return saved[first : first + place.number, place.states, ..., : place.chunk, :]


def sizes(call: DeltaCall) -> Sizes:
    return Sizes.fit(call.q, call.S, longest=LONGEST, segment=SEGMENT, padded=True)


def arrange(call: DeltaCall, *outputs: Tensor) -> tuple[DeltaCall, list[Tensor]]:
    """Return the call with views of q as (*b *g n d), of k, v, β and decays as (*b n d), and of the state as (b d dv),
    and views of `outputs`, or of their gradients, laid out as that of q."""
    lead = call.S.shape[:-2]
    q, *others = (group_view(x, lead, call.q.shape) for x in (call.q, *outputs))
    k, v, beta = (x.expand(*lead, *x.shape[-2:]) for x in call[1:4])
    log_decay, removal_key = (None if x is None else x.expand(*lead, *x.shape[-2:]) for x in call[5:7])
    return DeltaCall(q, k, v, beta, call.S.flatten(0, -3), log_decay, removal_key, call.scale), others


class Block:
    """The chunks of the block at `place`, in the accumulation dtype: `rows` (B g+1 C d), scaled queries and then the
    keys that read, k, `keys` β k (B C d), β (B C 1), the `decays` of rows and keys, the intra-chunk `products` [P, A]
    (B g+1 C C), and M = (1 + A)⁻¹. `matrices` are [P, A, M] (c b g+2 C C) as the forward saved them; None: they are
    computed."""

    def __init__(self, call: DeltaCall, place: Place, work: Workspace, matrices: Tensor | None = None):
        q, k, self.place, self.work, self.scale = place.chunks(call.q), place.chunks(call.k), place, work, call.scale
        groups, (chunk, d) = math.prod(q.shape[place.lead + 1 : -2]), k.shape[-2:]
        self.rows = work("rows", (math.prod(k.shape[:-2]), groups + 1, chunk, d))
        # a number would be multiplied in the dtype of q
        torch.mul(q, call.S.new_full((1,), call.scale), out=self.rows[:, :-1].view(q.shape))
        self.rows[:, -1].view(k.shape).copy_(k if call.removal_key is None else place.chunks(call.removal_key))
        self.k = self.rows[:, -1] if call.removal_key is None else place.load(call.k, "k", work)
        self.beta = place.load(call.beta, "beta", work)
        self.keys = torch.mul(self.k, self.beta, out=work("keys"))
        log_decay = None if call.log_decay is None else place.load(call.log_decay, "log_decay", work)
        self.decays = intra_chunk(self.rows, self.keys, log_decay, work)
        self.rows_since_start = self.decays.rows_since_start.flatten(1, 2)
        self.keys_until_end = self.decays.keys_until_end
        a = self.decays.chunk_decay
        self.chunk_decay = None if a is None else place.per_chunk(a)
        if matrices is None:
            self.products = self.decays.products()
            self.M = inverse(self.products[:, -1], work("M"))
        else:
            matrices = matrices[..., :chunk].flatten(0, 1)
            self.products, self.M = matrices[:, :-1], matrices[:, -1]
        self.P = self.products[:, :-1].flatten(1, 2)

    def copy_matrices(self, target: Tensor) -> None:
        """Copy [P, A, M] to `target` (c b g+2 C C)."""
        target = target[..., : self.place.chunk]
        for x, part in ((self.products, target[:, :, :-1]), (self.M, target[:, :, -1])):
            part.copy_(self.place.per_chunk(x))

    def outputs(self, v: Tensor, S: Tensor, E: Tensor) -> Tensor:
        """Return the outputs (B gC dv) for values v (c *b C dv), chunk by chunk, as errors depend on the state. Write
        the errors to E (c b C dv), and overwrite S (b d dv), the state before the block, with the state after it."""
        (B, _, C, _), dv = self.rows.shape, v.shape[-1]
        y = self.work("y", (B, self.P.shape[1], dv))
        reads = self.work("reads", (len(S), self.rows_since_start.shape[1], dv))
        difference = self.work("difference", (len(S), C, dv))
        prediction = reads[:, -C:].view(v.shape[1:])
        decays = [None] * len(v) if self.chunk_decay is None else self.chunk_decay
        parts = map(self.place.per_chunk, (y, self.M, self.P, self.rows_since_start, self.keys_until_end.mT))
        for v_part, e, a, y_part, M, P, rows, keys in zip(v, E, decays, *parts, strict=True):
            # one product for queries and keys
            torch.bmm(rows, S, out=reads)
            torch.sub(v_part, prediction, out=difference.view(prediction.shape))
            torch.bmm(M, difference, out=e)
            torch.baddbmm(reads[:, :-C], P, e, out=y_part)
            (S if a is None else S.mul_(a)).baddbmm_(keys, e)
        return y

    def states(self, E: Tensor, S: Tensor) -> Tensor:
        """Recompute the states that enter the chunks (B d dv) from the errors E (B C dv) and S (b d dv), the first."""
        b = len(S)
        S_ends = self.work("S", (len(E) + b, *S.shape[1:]))
        S_ends[:b] = S
        torch.bmm(self.keys_until_end.mT, E, out=S_ends[b:])
        scan(S_ends, self.place, self.chunk_decay)
        return S_ends[:-b]
