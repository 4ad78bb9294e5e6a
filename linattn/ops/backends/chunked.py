"""Matrix products inside chunks of 64 tokens, a running state between them: the form for training and prefill, on any
device. Blocks of the sequence small enough for the cache are loaded, mapped, multiplied and written once.

With D_ij the decay from key j to query i, r_i that since the chunk began, w_j that until it ends, a that over it all,

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v

The gradient is of the same kind, in reverse (Katharopoulos et al., https://arxiv.org/abs/2006.16236, eq. 13–15). What
is saved for it is the inputs, y and one state for every segment of 512 tokens; the rest is computed again."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends import reference
from linattn.ops.backends.base import Backend, CausalCall, accumulator, divide, infinite_if_none
from linattn.ops.backends.differentiable import Tensors, differentiable
from linattn.ops.elementwise import ELEMENTWISE

CHUNK, SEGMENT = 64, 512
# tokens times heads in one block: at 64 channels, a megabyte for each of q, k and v in float32
BLOCK = 4096
_LARGER = 24 * 2**20

# normalize, feature_map, blindspot, and whether states are saved for a gradient
Options = tuple[str | None, str, int, bool]


class Decay(NamedTuple):
    """Weights of a block's chunks: `inside` is D (… c C C), `since` r and `until` w (… c C 1), `whole` a (… c 1 1)."""

    inside: Tensor
    since: Tensor
    until: Tensor
    whole: Tensor


class Block(NamedTuple):
    """Features and values of one block in the accumulation dtype, as chunks: (… c C f) and (… c C dv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None
    decay: Decay | None


class Tile(NamedTuple):
    """Where a block is: some of the first dimension, and the tokens from `start` to `stop`."""

    rows: slice
    start: int
    stop: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The part of x whose tokens are in `dim`."""
        return _rows(x, self.rows).narrow(dim, self.start, self.stop - self.start)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """A first dimension of size 1 serves all rows."""
    return x if x.shape[0] == 1 else x[rows]


def _row_slices(call: CausalCall) -> list[slice]:
    """Cuts the first dimension into parts that fit the cache, unless its queries share a state."""
    rows, *others, n, _ = call.q.shape
    step = max(1, BLOCK // max(1, min(n, SEGMENT) * torch.Size(others).numel()))
    if call.S.shape[0] < rows:
        step = rows
    return [slice(first, first + step) for first in range(0, rows, step)]


def _chunk_length(call: CausalCall) -> int:
    """64 tokens or a short sequence's length; with a blindspot, a multiple of its blocks."""
    if call.blindspot > 1:
        return call.blindspot * max(1, CHUNK // call.blindspot)
    return max(1, min(CHUNK, call.q.shape[-2]))


def _segments(n: int, chunk: int) -> list[tuple[int, int]]:
    length = chunk * max(1, SEGMENT // chunk)
    return [(start, min(start + length, n)) for start in range(0, n, length)]


def _tiles(call: CausalCall, rows: slice) -> list[Tile]:
    return [Tile(rows, start, stop) for start, stop in _segments(call.q.shape[-2], _chunk_length(call))]


def _chunks(x: Tensor, chunk: int, dim: int) -> Tensor:
    """Splits the tokens into chunks, the last one filled up with zeros."""
    missing = -x.shape[dim] % chunk
    if missing:
        zeros = x.narrow(dim, 0, 1).expand([missing if i == x.ndim + dim else -1 for i in range(x.ndim)])
        x = torch.cat([x, torch.zeros_like(zeros)], dim)
    return x.unflatten(dim, (-1, chunk))


def _decay(log_decay: Tensor, visible: Tensor) -> Decay:
    """Sums of logarithms in float64, so that differences of long sums stay exact; −inf begins anew, and is counted."""
    exact = torch.float32 if log_decay.device.type == "mps" else torch.float64
    fresh = log_decay == -torch.inf
    total, count = log_decay.to(exact).masked_fill(fresh, 0).cumsum(-1), fresh.cumsum(-1)
    same = (count.unsqueeze(-1) == count.unsqueeze(-2)) & visible
    inside = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~same, -torch.inf)
    since = total.masked_fill(count > 0, -torch.inf)
    until = (total[..., -1:] - total).masked_fill(count[..., -1:] != count, -torch.inf)
    inside, since, until = (x.to(log_decay.dtype).exp() for x in (inside, since, until))
    return Decay(inside, since.unsqueeze(-1), until.unsqueeze(-1), since[..., -1:].unsqueeze(-1))


def _load(call: CausalCall, tile: Tile) -> Block:
    dtype, phi, chunk = accumulator(call.q.dtype), ELEMENTWISE[call.feature_map].function, _chunk_length(call)
    q, k, v = phi(tile.of(call.q, -2).to(dtype)), phi(tile.of(call.k, -2).to(dtype)), tile.of(call.v, -2).to(dtype)
    if call.key_mask is not None:
        mask = tile.of(call.key_mask, -1).unsqueeze(-1)
        k, v = torch.where(mask, k, 0), torch.where(mask, v, 0)
    visible, decay = reference.visible(chunk, call.blindspot, k.device), None
    if call.log_decay is not None:
        decay = _decay(_chunks(tile.of(call.log_decay, -1).to(dtype), chunk, -1), visible)
    # products copy operands whose chunks do not lie one after another, once for every product
    q, k, v = (_chunks(x, chunk, -2).contiguous() for x in (q, k, v))
    # the lower triangle has an operation of its own, faster than a mask
    return Block(q, k, v, None if call.blindspot == 1 else visible, decay)


def _weigh(A: Tensor, block: Block) -> Tensor:
    """A ∘ D, in place. What a query must not see is overwritten, not multiplied by zero: it may be infinite."""
    if block.decay is not None:
        A.mul_(block.decay.inside)
    return A.tril_() if block.visible is None else A.masked_fill_(~block.visible, 0)


def _weights(block: Block) -> Tensor:
    """D itself, (… c C C) or (C C)."""
    C = block.k.shape[-2]
    return block.decay.inside if block.decay is not None else _weigh(block.k.new_ones(C, C), block)


def _since(x: Tensor, block: Block) -> Tensor:
    return x if block.decay is None else x * block.decay.since


def _until(x: Tensor, block: Block) -> Tensor:
    return x if block.decay is None else x * block.decay.until


def _dot(x: Tensor, z: Tensor) -> Tensor:
    """Rows of x (… C f) with the column z (… f 1): as a product it would take half a matrix product's time."""
    return (x * z.mT).sum(-1, keepdim=True)


def _scan(sums: Tensor, state: Tensor, block: Block, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """From the chunks' own sums (… c x y), overwritten: the states that enter each chunk; and that after the last."""
    order = range(sums.shape[-3])
    for i in reversed(order) if reverse else order:
        entering, part = state, sums.select(-3, i)
        kept = state if block.decay is None else state * block.decay.whole.select(-3, i)
        state = kept + part
        # in the place of the sum that it has just taken in
        part.copy_(entering)
    return sums, state


def _forward(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the last state, and the states that enter each segment if they are to be saved."""
    f, dv = call.S.shape[-2:]
    y = call.v.new_empty(*call.q.shape[:-1], dv)
    S_end, z_end = torch.empty_like(call.S), torch.empty_like(call.z)
    entering = len(_tiles(call, slice(0))) if save else 0
    saved_S, saved_z = (call.S.new_empty(*call.S.shape[:-2], entering, f, width) for width in (dv, 1))
    for rows in _row_slices(call):
        S, z = _rows(call.S, rows), _rows(call.z, rows).unsqueeze(-1)
        for i, tile in enumerate(_tiles(call, rows)):
            if save:
                _rows(saved_S, rows).select(-3, i).copy_(S)
                _rows(saved_z, rows).select(-3, i).copy_(z)
            part, S, z = _block_outputs(_load(call, tile), S, z, call.normalize)
            tile.of(y, -2).copy_(part.flatten(-3, -2).narrow(-2, 0, tile.stop - tile.start))
        _rows(S_end, rows).copy_(S)
        _rows(z_end, rows).copy_(z.squeeze(-1))
    return y, S_end, z_end, saved_S, saved_z


def _spread(sums: Tensor, lead: torch.Size) -> Tensor:
    """Room for the states, which differ between rows that share keys if their masks or decays differ."""
    return sums if sums.shape[:-3] == lead else sums.expand(*lead, *sums.shape[-3:]).contiguous()


def _states(block: Block, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states that enter each chunk, and those that leave the block."""
    k = _until(block.k, block)
    lead = S.shape[:-2]
    S_in, S = _scan(_spread(k.mT @ block.v, lead), S, block)
    z_in, z = _scan(_spread(k.sum(-2).unsqueeze(-1), lead), z, block)
    return S_in, z_in, S, z


def _block_outputs(block: Block, S: Tensor, z: Tensor, normalize: str | None) -> tuple[Tensor, Tensor, Tensor]:
    S_in, z_in, S, z = _states(block, S, z)
    q = block.q
    if normalize == "keys":
        q = divide(q, _weights(block) @ block.k + _since(z_in.mT, block))
    A, q_in = _weigh(q @ block.k.mT, block), _since(q, block)
    y = (A @ block.v).add_(q_in @ S_in)
    if normalize == "output":
        y.div_(_denominator(A, q_in, z_in))
    return y, S, z


def _denominator(A: Tensor, q_in: Tensor, z_in: Tensor) -> Tensor:
    return infinite_if_none(A.sum(-1, keepdim=True).add_(_dot(q_in, z_in)))


class _BlockGradients(NamedTuple):
    """Of one block's features and values (… c C ·), of the logarithms of its tokens' weights, of the state before."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_weight: Tensor | None
    S: Tensor
    z: Tensor


def _block_gradients(
    block: Block, S: Tensor, z: Tensor, y: Tensor, dy: Tensor, dS: Tensor, dz: Tensor, normalize: str | None
) -> _BlockGradients:
    """With y = N / d, dN = dy / d and dd = −dN·y. D's own gradient follows from q·dq and k·dk."""
    S_in, z_in, _, _ = _states(block, S, z)
    q, k, v = block.q, block.k, block.v

    def of_keys(x: Tensor) -> Tensor:
        return x.sum_to_size(*S_in.shape[:-2], *x.shape[-2:])

    total = q
    if normalize == "keys":
        total = _weights(block) @ k + _since(z_in.mT, block)
        q = divide(q, total)
    A, q_in = _weigh(q @ k.mT, block), _since(q, block)
    dd = None
    if normalize != "output":
        dy = dy.contiguous()
    else:
        dy = dy / _denominator(A, q_in, z_in)
        dd = -(dy * y).sum(-1, keepdim=True)
    G, from_state = dy @ v.mT, dy @ S_in.mT
    if dd is not None:
        G.add_(dd)
        from_state.add_(dd * z_in.mT)
    _weigh(G, block)
    dq = (G @ k).add_(_since(from_state, block))
    dz_sums = torch.zeros_like(z_in) if dd is None else of_keys((q_in * dd).sum(-2).unsqueeze(-1))
    dk = of_keys(G.mT @ q)
    if normalize == "keys":
        dtotal = -divide(dq * q, total)
        dq = divide(dq, total)
        dk.add_(of_keys(_weights(block).mT @ dtotal))
        dz_sums = of_keys(_since(dtotal, block).sum(-2).unsqueeze(-1))
    dS_out, dS = _scan(of_keys(q_in.mT @ dy), dS, block, reverse=True)
    dz_out, dz = _scan(dz_sums, dz, block, reverse=True)
    dk.add_(_until((v @ dS_out.mT).add_(dz_out.mT), block))
    dv = of_keys(A.mT @ dy).add_(_until(k @ dS_out, block))
    log_weight = None
    if block.decay is not None:
        log_weight = -(k * dk).sum(-1, keepdim=True)
        # an output that is normalised does not change when its query grows, so there q·dq is zero
        if normalize is None:
            log_weight = log_weight + of_keys((q * dq).sum(-1, keepdim=True))
    return _BlockGradients(dq, dk, dv, log_weight, dS, dz)


def _backward(call: CausalCall, results: tuple[Tensor, ...], grads: Tensors) -> Tensors:
    """Gradients of the call's seven tensors, in one pass over the blocks from the last to the first."""
    (y, S_end, z_end, *saved), (dy, dS_end, dz_end) = results, grads
    assert dy is not None and dS_end is not None and dz_end is not None
    if saved[0].shape[-3] == 0:
        # inside vmap a tensor does not tell that a gradient will be asked for
        saved = _forward(call, save=True)[3:]
    dq, dk, dv, dS_start, dz_start = (torch.empty_like(x) for x in call[:5])
    dlog_weight = None if call.log_decay is None else torch.empty_like(call.log_decay, dtype=dS_end.dtype)
    for rows in _row_slices(call):
        dS, dz = _rows(dS_end, rows), _rows(dz_end, rows).unsqueeze(-1)
        for i, tile in reversed(list(enumerate(_tiles(call, rows)))):
            S, z = (_rows(x, rows).select(-3, i) for x in saved)
            block = _load(call, tile)
            chunk = block.q.shape[-2]
            y_block, dy_block = (_chunks(tile.of(x, -2).to(S.dtype), chunk, -2) for x in (y, dy))
            part = _block_gradients(block, S, z, y_block, dy_block, dS, dz, call.normalize)
            dS, dz = part.S, part.z
            _write(dq, tile, _through_map(part.q, block.q, call.q, call, tile), None)
            _write(dk, tile, _through_map(part.k, block.k, call.k, call, tile), call.key_mask)
            _write(dv, tile, part.v, call.key_mask)
            if dlog_weight is not None and part.log_weight is not None:
                _write(dlog_weight.unsqueeze(-1), tile, part.log_weight, None)
        _rows(dS_start, rows).copy_(dS)
        _rows(dz_start, rows).copy_(dz.squeeze(-1))
    if call.log_decay is None or dlog_weight is None:
        return dq, dk, dv, dS_start, dz_start, None, None
    end = (S_end * dS_end).sum((-1, -2)) + (z_end * dz_end).sum(-1)
    return dq, dk, dv, dS_start, dz_start, _decay_gradient(call.log_decay, dlog_weight, end.unsqueeze(-1)), None


def _through_map(gradient: Tensor, features: Tensor, x: Tensor, call: CausalCall, tile: Tile) -> Tensor:
    """The chain rule: from the gradient of φ(x) that of x."""
    derivative = ELEMENTWISE[call.feature_map].derivative
    if derivative is None:
        return gradient
    x = _chunks(tile.of(x, -2).to(gradient.dtype), features.shape[-2], -2)
    return gradient.mul_(derivative(x, features))


def _write(total: Tensor, tile: Tile, part: Tensor, key_mask: Tensor | None) -> None:
    """Writes a block's gradient where it belongs; what was broadcast is summed."""
    part = part.flatten(-3, -2).narrow(-2, 0, tile.stop - tile.start)
    if key_mask is not None:
        part = torch.where(tile.of(key_mask, -1).unsqueeze(-1), part, 0)
    target = tile.of(total, -2)
    part = part.sum_to_size(*target.shape)
    if total.shape[0] == 1 and tile.rows.start > 0:
        target.add_(part)
    else:
        target.copy_(part)


def _decay_gradient(log_decay: Tensor, dlog_weight: Tensor, end: Tensor) -> Tensor:
    """A decay at t weighs what the queries from t on, and the last state, get from before t."""
    total = dlog_weight.flip(-1).cumsum(-1).flip(-1) + end.sum_to_size(*dlog_weight.shape[:-1], 1)
    return total.masked_fill(log_decay == -torch.inf, 0).to(log_decay.dtype)


def _call(inputs: Tensors, options: Options) -> CausalCall:
    q, k, v, S, z, log_decay, key_mask = inputs
    assert q is not None and k is not None and v is not None and S is not None and z is not None
    return CausalCall(q, k, v, S, z, log_decay, key_mask, *options[:3])


def _forward_of(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    return _forward(_call(inputs, options), save=options[3])


def _backward_of(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, options: Options) -> Tensors:
    return _backward(_call(inputs, options), results, grads)


def _definition_of(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    return reference.run(_call(inputs, options))


_operator = differentiable(_forward_of, _backward_of, _definition_of, outputs=3)


def run(call: CausalCall) -> tuple[Tensor, Tensor, Tensor]:
    if call.q.ndim == 2:
        one_row = {name: x.unsqueeze(0) for name, x in call._asdict().items() if isinstance(x, Tensor)}
        y, S, z = run(call._replace(**one_row))
        return y.squeeze(0), S.squeeze(0), z.squeeze(0)
    if call.q.shape[-2] > SEGMENT:
        # glibc hands freed blocks back to the system, and has them faulted in again, unless it has seen larger ones go
        torch.UntypedStorage(_LARGER)
    inputs, options = call[:7], call[7:]
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    y, S, z, *_ = _operator((*options, save), *inputs)
    return y, S, z


BACKEND = Backend("chunked", lambda call: None, run)
