"""Matrix products inside chunks of tokens, a running state between them: the form for training and prefill, on any
device. Blocks of the sequence small enough for the cache are loaded, mapped, multiplied and written once.

With D_ij the decay from key j to query i, r_i that since the chunk began, w_j that until it ends, a that over it all,

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v

The gradient is of the same kind, in reverse (Katharopoulos et al., https://arxiv.org/abs/2006.16236, eq. 13–15). What
is saved for it is the inputs, y and one state for every segment of tokens; the rest is computed again."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends import loopless, reference
from linattn.ops.backends.base import Backend, CausalCall, divide, infinite_if_none, without_autocast
from linattn.ops.backends.blocks import (
    Block,
    Tile,
    cut,
    dot_of_queries,
    load,
    number_of_blocks,
    of_queries,
    rows_of,
    spread_keys,
    write,
    write_keys,
)
from linattn.ops.backends.differentiable import Tensors, differentiable
from linattn.ops.backends.library import define, kept_whole
from linattn.ops.backends.memory import Workspace, empty_like, keep_freed_memory
from linattn.ops.elementwise import ELEMENTWISE

# normalize, feature_map, blindspot, and whether states are saved for a gradient
Options = tuple[str | None, str, int, bool]


class Ends(NamedTuple):
    """States at the c + 1 ends of a block's chunks, (c+1 b f dv) and (c+1 b f)."""

    S: Tensor
    z: Tensor

    def before(self) -> tuple[Tensor, Tensor]:
        """Those that enter each chunk, (cb f dv) and (cb 1 f)."""
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
    parts.tril_() if block.visible is None else parts.masked_fill_(~block.visible, 0)
    return A


def _weights(block: Block) -> Tensor:
    """D itself, (cb C C)."""
    n, C, _ = block.k.shape
    return _weigh(block.k.new_ones(n, C, C), block)


def _since(x: Tensor, block: Block) -> Tensor:
    return x if block.decay is None else (_per_group(x, block) * block.decay.since).flatten(1, 2)


def _until(x: Tensor, block: Block) -> Tensor:
    return x if block.decay is None else x * block.decay.until.squeeze(1)


def _dot(x: Tensor, y: Tensor, room: Workspace) -> Tensor:
    """Of rows: as a product it would take half a matrix product's time."""
    return torch.mul(x, y, out=room.scratch(x)).sum(-1, keepdim=True)


def _ends(state: tuple[Tensor, Tensor], block: Block, first: int, room: Workspace) -> Ends:
    """Room for the states at the ends of all chunks, that at the first or the last of them given."""
    chunks = block.k.shape[0] // block.sequences
    ends = Ends(*(room(name, chunks + 1, *x.shape) for name, x in zip(("S", "z"), state, strict=True)))
    for x, given in zip(ends, state, strict=True):
        x[first] = given
    return ends


def _accumulate(ends: Ends, block: Block, *, reverse: bool = False) -> None:
    """From each chunk's own sums, the state at its one end, given that at the other end of the block; in place."""
    whole = None if block.decay is None else block.decay.whole.unbind(0)
    for x, weights in ((ends.S, whole), (ends.z, whole and [a.squeeze(-1) for a in whole])):
        states = x.unbind(0)
        for i in reversed(range(len(states) - 1)) if reverse else range(len(states) - 1):
            done, following = (states[i + 1], states[i]) if reverse else (states[i], states[i + 1])
            following.add_(done) if weights is None else following.addcmul_(done, weights[i])


def _states(block: Block, state: tuple[Tensor, Tensor], room: Workspace) -> Ends:
    """From the state, (b f dv) and (b f), that enters the block."""
    ends, k = _ends(state, block, 0, room), _until(block.k, block)
    S, z = ends.after()
    S.baddbmm_(k.mT, block.v, beta=0)
    z.copy_(k.sum(1, keepdim=True))
    _accumulate(ends, block)
    return ends


def _denominator(A: Tensor | None, q_in: Tensor, z_in: Tensor, block: Block, room: Workspace) -> Tensor:
    total = _dot(q_in, z_in, room)
    if A is not None:
        total = A.sum(-1, keepdim=True).add_(total)
    return infinite_if_none(total, nonnegative=block.nonnegative)


def _key_sums(block: Block, z_in: Tensor) -> Tensor:
    """z_i, the sum of the keys that each query sees, (cb C f)."""
    before = _since(z_in.expand_as(block.k), block)
    return before if block.blind else before + _weights(block) @ block.k


def _over_key_sums(x: Tensor, total: Tensor, block: Block) -> Tensor:
    return divide(_per_group(x, block), total.unsqueeze(1)).flatten(1, 2)


def _product(a: Tensor, b: Tensor, room: Workspace, name: str) -> Tensor:
    return room(name, *a.shape[:2], b.shape[2]).baddbmm_(a, b, beta=0)


def _similarities(q: Tensor, block: Block, room: Workspace) -> Tensor | None:
    """A = q kᵀ ∘ D; None where no query sees a key of its own chunk."""
    return None if block.blind else _weigh(_product(q, block.k.mT, room, "A"), block)


def _outputs(block: Block, ends: Ends, normalize: str | None, room: Workspace) -> Tensor:
    """(cb gC dv)"""
    (S_in, z_in), q = ends.before(), block.q
    if normalize == "keys":
        q = _over_key_sums(q, _key_sums(block, z_in), block)
    A, q_in = _similarities(q, block, room), _since(q, block)
    y = _product(q_in, S_in, room, "y") if A is None else _product(A, block.v, room, "y").baddbmm_(q_in, S_in)
    return y.div_(_denominator(A, q_in, z_in, block, room)) if normalize == "output" else y


def _state_of(S: Tensor, z: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """(b f dv) and (b f)"""
    return rows_of(S, rows).reshape(-1, *S.shape[-2:]), rows_of(z, rows).reshape(-1, z.shape[-1])


def _forward(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the last state, and the states (i, lead, f, dv) that enter each block if they are to be saved."""
    plan, dv = cut(call), call.S.shape[-1]
    y = empty_like(call.v, (*call.q.shape[:-1], dv))
    S_end, z_end = torch.empty_like(call.S), torch.empty_like(call.z)
    saved = _room_for_states(call, save)
    spread, room = spread_keys(call), Workspace(call.S)
    for rows, tiles in plan:
        state = _state_of(call.S, call.z, rows)
        for i, tile in enumerate(tiles):
            if save:
                _save(state, (saved[0][i], saved[1][i]), rows)
            block = load(spread, tile, room)
            ends = _states(block, state, room)
            write(y, tile, _outputs(block, ends, call.normalize, room))
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
    """Of the call's queries, keys and values, and of the logarithms of its tokens' weights."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_weight: Tensor | None


class Shared(NamedTuple):
    """What the gradients of keys take from those of queries: N's (cb gC dv), those of D ∘ qkᵀ and that itself
    (cb gC C; None where there is none), queries as they were multiplied, and as they met the state, and each chunk's
    share in z's."""

    dN: Tensor
    G: Tensor | None
    A: Tensor | None
    q: Tensor
    q_in: Tensor
    dz: Tensor | None
    dtotal: Tensor | None
    log_weight: Tensor | None


def _to_queries(
    call: CausalCall, tile: Tile, block: Block, ends: Ends, y: Tensor, dy: Tensor, into: Gradients, room: Workspace
) -> Shared:
    """Writes their gradients. With y = N / d, dN = dy / d and dd = −dN·y."""
    (S_in, z_in), normalize = ends.before(), call.normalize
    q, k, total, dz, dtotal, log_weight = block.q, block.k, None, None, None, None
    if normalize == "keys":
        total = _key_sums(block, z_in)
        q = _over_key_sums(q, total, block)
    A, q_in = _similarities(q, block, room), _since(q, block)
    dN, dd = of_queries(dy, tile, room, "y"), None
    if normalize == "output":
        d = _denominator(A, q_in, z_in, block, room)
        dN, dd = dN.div_(d), -dot_of_queries(dy, y, tile, room) / d
    dq, G = _product(dN, S_in.mT, room, "dq"), None if A is None else _product(dN, block.v.mT, room, "G")
    if dd is not None:
        dq.addcmul_(dd, z_in)
        if G is not None:
            G.add_(dd)
        dz = torch.mul(q_in, dd, out=room.scratch(q_in)).sum(1, keepdim=True)
    dq = _since(dq, block)
    if G is not None:
        dq.baddbmm_(_weigh(G, block), k)
    if total is not None:
        dtotal = -divide(_per_group(dq * q, block).sum(1), total)
        dz = _since(dtotal, block).sum(1, keepdim=True)
        dq = _over_key_sums(dq, total, block)
    # an output that is normalised does not change when its query grows: then q·dq is zero
    if block.decay is not None and normalize is None:
        log_weight = _per_group(_dot(q, dq, room), block).sum(1)
    write(into.q, tile, _through_map(dq, block.q, call, room))
    return Shared(dN, G, A, q, q_in, dz, dtotal, log_weight)


def _to_keys(
    call: CausalCall,
    tile: Tile,
    block: Block,
    past: Shared,
    dstate: tuple[Tensor, Tensor],
    into: Gradients,
    room: Workspace,
) -> tuple[Tensor, Tensor]:
    """Writes the gradients of keys and values; returns that of the state before, from that of the state after."""
    k, v, ends = block.k, block.v, _ends(dstate, block, -1, room)
    dS, dz = ends.before()
    dS.baddbmm_(past.q_in.mT, past.dN, beta=0)
    dz.zero_() if past.dz is None else dz.copy_(past.dz)
    _accumulate(ends, block, reverse=True)
    dS, dz = ends.after()
    dv, dk = _product(_until(k, block), dS, room, "dv"), _product(_until(v, block), dS.mT, room, "dk")
    if past.A is not None and past.G is not None:
        dv.baddbmm_(past.A.mT, past.dN)
        dk.baddbmm_(past.G.mT, past.q)
    write_keys(into.v, tile, dv, block, call)
    dk.add_(_until(dz, block))
    if past.dtotal is not None and not block.blind:
        dk.baddbmm_(_weights(block).mT, past.dtotal)
    if into.log_weight is not None:
        # D's own gradient follows from q·dq and k·dk
        log_weight = -_dot(k, dk, room) if past.log_weight is None else past.log_weight - _dot(k, dk, room)
        write_keys(into.log_weight, tile, log_weight, block._replace(missing=None), call)
    write_keys(into.k, tile, _through_map(dk, k, call, room), block, call)
    return ends.S[0].clone(), ends.z[0].clone()


def _backward(call: CausalCall, results: tuple[Tensor, ...], grads: Tensors) -> Tensors:
    """Gradients of the call's seven tensors, in one pass over the blocks from the last to the first."""
    (y, S_end, z_end, *saved), (dy, dS_end, dz_end) = results, grads
    assert dy is not None and dS_end is not None and dz_end is not None
    if saved[0].shape[0] == 0:
        # inside vmap a tensor does not tell that a gradient will be asked for
        saved = _forward(call, save=True)[3:]
    dq, dk, dv = (empty_like(x, x.shape) for x in call[:3])
    dS_start, dz_start = torch.empty_like(call.S), torch.empty_like(call.z)
    log_weight = (
        None if call.log_decay is None else call.log_decay.new_empty(*call.log_decay.shape, 1, dtype=S_end.dtype)
    )
    spread, into, room = spread_keys(call), Gradients(dq, dk, dv, log_weight), Workspace(call.S)
    for rows, tiles in cut(call):
        dstate = _state_of(dS_end, dz_end, rows)
        for i, tile in reversed(list(enumerate(tiles))):
            block = load(spread, tile, room)
            ends = _states(block, _state_of(saved[0][i], saved[1][i], rows), room)
            past = _to_queries(call, tile, block, ends, y, dy, into, room)
            dstate = _to_keys(call, tile, block, past, dstate, into, room)
        _save(dstate, (dS_start, dz_start), rows)
    if call.log_decay is None or log_weight is None:
        return dq, dk, dv, dS_start, dz_start, None, None
    end = (S_end * dS_end).sum((-1, -2)) + (z_end * dz_end).sum(-1)
    dlog_decay = _decay_gradient(call.log_decay, log_weight.squeeze(-1), end.unsqueeze(-1))
    return dq, dk, dv, dS_start, dz_start, dlog_decay, None


def _through_map(gradient: Tensor, features: Tensor, call: CausalCall, room: Workspace) -> Tensor:
    """The chain rule: from the gradient of φ(x) that of x, in place."""
    derivative = ELEMENTWISE[call.feature_map].derivative
    return gradient if derivative is None else gradient.mul_(derivative(features, room.scratch(features)))


def _decay_gradient(log_decay: Tensor, dlog_weight: Tensor, end: Tensor) -> Tensor:
    """A decay at t weighs what the queries from t on, and the last state, get from before t."""
    total = dlog_weight.flip(-1).cumsum(-1).flip(-1) + end.sum_to_size(*dlog_weight.shape[:-1], 1)
    return total.masked_fill(log_decay == -torch.inf, 0).to(log_decay.dtype)


def _call(inputs: Tensors, options: Options) -> CausalCall:
    q, k, v, S, z, log_decay, key_mask = inputs
    assert q is not None and k is not None and v is not None and S is not None and z is not None
    return CausalCall(q, k, v, S, z, log_decay, key_mask, *options[:3])


def _run_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return _forward(_call(arguments[:7], arguments[7:]), save=arguments[-1])


def _forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    call = _call(arguments[:7], arguments[7:])
    y = call.v.new_empty(*call.q.shape[:-1], call.S.shape[-1])
    return y, torch.empty_like(call.S), torch.empty_like(call.z), *_room_for_states(call, arguments[-1])


def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Three gradients, five results, seven inputs and the options; an empty gradient stands for none."""
    call = _call(arguments[8:15], arguments[15:])
    *gradients, of_decay, _ = _backward(call, arguments[3:8], arguments[:3])
    return *(x for x in gradients if x is not None), call.S.new_empty(0) if of_decay is None else of_decay.contiguous()


def _backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, S, z, log_decay, *_ = _call(arguments[8:15], arguments[15:])
    of_decay = S.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), torch.empty_like(S), torch.empty_like(z), of_decay


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor S, Tensor z, Tensor? log_decay, Tensor? key_mask"
_OPTIONS = "str? normalize, str feature_map, SymInt blindspot, bool save"
_whole_forward = define(
    "chunked", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _run_forward, _forward_shapes
)
_whole_backward = define(
    "chunked_gradient",
    "(Tensor dy, Tensor dS_end, Tensor dz_end, Tensor y, Tensor S_end, Tensor z_end, Tensor saved_S, Tensor saved_z, "
    f"{_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _backward_shapes,
)


def _forward_of(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    run = _whole_forward if kept_whole(inputs[0]) else _run_forward
    return run(*inputs, *options)


def _backward_of(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, options: Options) -> Tensors:
    run = _whole_backward if kept_whole(inputs[0]) else _run_backward
    *gradients, of_decay = run(*grads, *results, *inputs, *options)
    return *gradients, None if inputs[5] is None else of_decay, None


def _definition_of(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    return reference.run(_call(inputs, options))


_operator = differentiable(_forward_of, _backward_of, _definition_of, outputs=3)


def run(call: CausalCall) -> tuple[Tensor, Tensor, Tensor]:
    if call.q.ndim == 2:
        one_row = {name: x.unsqueeze(0) for name, x in call._asdict().items() if isinstance(x, Tensor)}
        y, S, z = run(call._replace(**one_row))
        return y.squeeze(0), S.squeeze(0), z.squeeze(0)
    if torch.compiler.is_exporting():
        with without_autocast(call.q):
            return loopless.run(call)
    keep_freed_memory(call.q)
    inputs, options = call[:7], call[7:]
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    with without_autocast(call.q):
        y, S, z, *_ = _operator((*options, save), *inputs)
    return y, S, z


BACKEND = Backend("chunked", lambda call: None, run)
