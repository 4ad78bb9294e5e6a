"""The chunked form for H heads that share queries and keys, each with values and a decay of its own, as in Mamba-2. Dao
and Gu, https://arxiv.org/abs/2405.21060, section 6. Shapes: a block has c chunks of b sequences, B = c b, and C tokens
per chunk; e is the width of [v, 1], values with a last column of ones.

The products of queries and keys are computed once for all heads h; decays belong to values and outputs:

    A_h = q kᵀ ∘ D_h        y_h = A_h v_h + r_h q S_h        S_h ← a_h S_h + kᵀ (w_h v_h)

D, r, w and a are those of linear.py. With [v, 1] as values, [S, z] is one state (f He), in which the heads stand side
by side, and [numerator, denominator] one output."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Place, Workspace, empty_like, group_view, scan
from linattn.ops.fast.decay_weights import decay_weights
from linattn.ops.fast.linear import sizes
from linattn.ops.numerics import infinite_if_none


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return y, the last S and z, and the states that enter each of the i blocks (i b f He), empty unless `save`."""
    y, S_end, z_end, S_saved = empty(call, save)
    views, work = arrange(call), Workspace(call.S)
    y_view, S = heads_view(y, call), views.S.flatten(0, -3).clone()
    for place in sizes(views).places(views.S.shape[:-2], views.q.shape[-2]):
        rows = place.states
        if save:
            S_saved[place.position, rows] = S[rows]
        block = Block(views, place, work)
        S_ends = block.states(S[rows])
        b = len(S_ends) - len(block.k)
        y_part, d = block.outputs(block.reads(S_ends[:-b]))
        place.write(y_view, y_part if d is None else y_part.div_(d))
        S[rows] = S_ends[-b:]
    write_states(S, call, S_end, z_end)
    return y, S_end, z_end, S_saved


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return uninitialized tensors for the results of `forward`. Works with a symbolic length."""
    views, n = arrange(call), call.q.shape[-2]
    blocks, S = sizes(views).count(n) if save else 0, views.S.flatten(0, -3)
    y = empty_like(call.v, (*call.S.shape[:-2], n, call.v.shape[-1]))
    return y, *(call.S.new_empty(shape) for shape in (call.S.shape, call.z.shape, (blocks, *S.shape)))


def heads_view(x: Tensor, call: CausalCall) -> Tensor:
    """View x (*lead n d) as (*b *H n d): the dimensions of heads that share queries move beside the tokens."""
    return group_view(x, call.S.shape[:-2], call.q.shape)


def states_view(S: Tensor, call: CausalCall) -> Tensor:
    """View states S (*lead f e) as (*b f *H e)."""
    return heads_view(S, call).movedim(-2, S.ndim - 2)


def arrange(call: CausalCall) -> CausalCall:
    """Return the call with views of q and k as (*b n f), v as (*b *H n dv), decays as (*b *H n 1), the mask as
    (*b n 1), and with [S, z] (*b f He) as S."""
    lead, S = call.S.shape[:-2], torch.cat([call.S, call.z.unsqueeze(-1)], -1)
    assert call.log_decay is not None
    v, log_decay = (heads_view(x.expand(*lead, -1, -1), call) for x in (call.v, call.log_decay.unsqueeze(-1)))
    S, b = states_view(S, call).flatten(len(lead) + 1), call.q.shape[:-2]
    mask = None if call.key_mask is None else call.key_mask.unsqueeze(-1).expand(*b, -1, -1)
    return CausalCall(call.q, call.k.expand(*b, -1, -1), v, S, call.z, log_decay, mask, *call[7:])


def write_states(states: Tensor, call: CausalCall, S: Tensor, z: Tensor) -> None:
    """Copy `states` (b f He) to S (*lead f dv) and z (*lead f), with the leading dimensions of the call's state."""
    both = S.new_empty(*z.shape, S.shape[-1] + 1)
    heads = states_view(both, call)
    heads.copy_(states.view(heads.shape))
    S.copy_(both[..., :-1])
    z.copy_(both[..., -1])


class Block:
    """The chunks of the block at `place`, in the accumulation dtype: q and k (B C f), v (B H C e), decays D (B H C C),
    r and w (B H C 1) and a, as `chunk_decay` (c b 1 He), the undecayed `products` q kᵀ (B C C) and A = q kᵀ ∘ D."""

    def __init__(self, call: CausalCall, place: Place, work: Workspace):
        phi = ELEMENTWISE[call.feature_map]
        self.place, self.work, self.missing = place, work, None
        self.normalize, self.nonnegative = call.normalize, phi.nonnegative
        self.q, self.k = place.load(call.q, "q", work, phi), place.load(call.k, "k", work, phi)
        self.v = self.load_values("v", call.v, 1)
        if call.key_mask is not None:
            self.missing = ~place.chunks(call.key_mask).flatten(0, place.lead)
            self.k.masked_fill_(self.missing, 0)
            self.v.masked_fill_(self.missing.unsqueeze(1), 0)
            # a NaN in a masked query must not reach the gradients of the keys that the query sees
            self.q.masked_fill_(self.missing & ~self.q.sum(-1, keepdim=True).isfinite(), 0)
        assert call.log_decay is not None
        heads, log_decay = self.v.shape[:2], place.chunks(call.log_decay).to(self.q.dtype).flatten(0, -3)
        self.D, self.r, self.w = (x.squeeze(1).unflatten(0, heads) for x in decay_weights(log_decay))
        a = place.per_chunk(self.r[:, :, -1])
        self.chunk_decay = a.expand(*[-1] * 3, self.v.shape[-1]).flatten(-2).unsqueeze(2)
        self.products = torch.bmm(self.q, self.k.mT, out=work("products"))
        # products with later keys are overwritten, not multiplied by zero: they may be infinite
        self.A = torch.mul(self.products.unsqueeze(1), self.D, out=work("A")).tril_()

    def load_values(self, name: str, x: Tensor, last: int) -> Tensor:
        """Copy x, values or gradients of outputs (*b *H n dv), to the scratch tensor `name`, as (B H C e), and fill the
        last column with the number `last`."""
        x = self.place.chunks(x)
        values = self.work(name, (*x.shape[:-1], x.shape[-1] + 1))
        values[..., :-1].copy_(x)
        values[..., -1] = last
        return values.view(len(self.q), -1, *values.shape[-2:])

    def by_token(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """Return x (B H C e) times `weight` (B H C 1) as (B C He), in the scratch tensor `name`."""
        B, H, C, e = x.shape
        product = self.work(name, (B, C, H, e))
        torch.mul(x.transpose(1, 2), weight.transpose(1, 2), out=product)
        return product.flatten(2)

    def by_head(self, x: Tensor) -> Tensor:
        """View x (B C He) as (B H C e)."""
        return x.unflatten(2, (self.v.shape[1], -1)).transpose(1, 2)

    def states(self, S: Tensor) -> Tensor:
        """Return the states at the c + 1 ends of chunks (cb+b f He), from S (b f He), those before the block."""
        S_ends = self.work("S", (len(self.q) + len(S), *S.shape[1:]))
        S_ends[: len(S)] = S
        self.v_until_end = self.by_token(self.v, self.w, "v_until_end")
        S_ends[len(S) :].baddbmm_(self.k.mT, self.v_until_end, beta=0)
        scan(S_ends, self.place, self.chunk_decay)
        return S_ends

    def reads(self, S: Tensor) -> Tensor:
        """Return q S (B H C e), where S (B f He) are the states that enter the chunks."""
        return self.by_head(torch.bmm(self.q, S, out=self.work("reads")))

    def outputs(self, reads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the numerators (B H C e−1), and the denominators (B H C 1) or None, from q S in `reads`."""
        y = torch.bmm(self.A.flatten(0, 1), self.v.flatten(0, 1), out=self.work("y"))
        y = y.view_as(self.v).addcmul_(reads, self.r)
        d = infinite_if_none(y[..., -1:], nonnegative=self.nonnegative) if self.normalize else None
        return y[..., :-1], d
