"""Kernels for the splits of a row: the sums of each split, and the states that enter it (arguments: device.py)."""

# type checkers do not see that the constant K is a record
# pyright: reportAttributeAccessIssue=false
# nor that `tl.range` is iterated over
# pyright: reportGeneralTypeIssues=false
# constants decide which branches are compiled, and so which names are bound
# pyright: reportPossiblyUnboundVariable=false

import triton.language as tl

from linattn.ops.triton import arithmetic as num
from linattn.ops.triton import device as dev


@dev.jit
def key_sums(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """Write Σ φ(k) vᵀ and Σ φ(k) of a split, and the product of its decays. BF covers all features."""
    row, split, begin, stop = dev.span(walk)
    features, values = dev.channels(0, K.F, K.BF), dev.channels(dev.part(walk), K.DV, K.BV)
    k, v = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    key_mask, decay = dev.in_row(scalars, walk.scalars, row, 1)
    # transposed, as in `query_gradient`; and no operand of a product stays in registers from chunk to chunk
    S_i, z_i = tl.full((K.BV, K.BF), 0, tl.float32), tl.full((K.BF,), 0, tl.float32)
    total = tl.full((1,), 1, tl.float32)
    for start in tl.range(begin, stop, K.C, num_stages=K.STAGES):
        chunk = dev.chunk(start, stop, K.C)
        present = dev.load_present(key_mask, chunk, K)
        if K.DECAYED:
            _, until, whole = dev.load_decay(decay, chunk)
        k_j = dev.load_keys(k, chunk, features, present, phi, K)
        v_j = dev.load_values(v, chunk, values, present, K)
        if K.DECAYED:
            k_j = num.rounded(k_j.to(tl.float32) * until[:, None], K.PRECISION)
            S_i, z_i, total = S_i * whole[:, None], z_i * whole, total * whole
        S_i += num.product(tl.trans(v_j), k_j, K.PRECISION)
        z_i += tl.sum(tl.where(present[:, None], k_j.to(tl.float32), 0.0), 0)
    first, decays = dev.part(walk) == 0, numbers[0]
    (sums,) = dev.states_in(states, walk.states, row, split, K)
    dev.store_state(sums, features, values, tl.trans(S_i), z_i, True, first, K)
    tl.store(decays + dev.place(walk) + tl.arange(0, 1), total, mask=dev.where(first, tl.full((1,), True, tl.int1)))


@dev.jit
def query_sums(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """Write the split's part of the gradient of the state before it: Σ φ(q) dyᵀ / d and −Σ φ(q) δ / d."""
    row, split, begin, stop = dev.span(walk)
    features, values = dev.channels(0, K.F, K.BF), dev.channels(dev.part(walk), K.DV, K.BV)
    q, dy = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    key_mask, decay = dev.in_row(scalars, walk.scalars, row, 1)
    inverse, delta, decays = numbers
    inverse, delta = dev.per_token(inverse, walk, False), dev.per_token(delta, walk, False)
    dS_j, dz_j = tl.full((K.BV, K.BF), 0, tl.float32), tl.full((K.BF,), 0, tl.float32)
    total = tl.full((1,), 1, tl.float32)
    chunks = tl.cdiv(stop - begin, K.C)
    for i in tl.range(0, chunks, num_stages=K.STAGES):
        chunk = dev.chunk(begin + (chunks - 1 - i) * K.C, stop, K.C)
        present = dev.load_present(key_mask, chunk, K)
        if K.DECAYED:
            since, _, whole = dev.load_decay(decay, chunk)
        q_i = dev.load_queries(q, chunk, features, present, phi, K)
        dy_i = num.rounded(dev.load(dy, chunk, values), K.PRECISION)
        scale = tl.where(chunk[1], 1.0, 0.0)
        if K.NORMALIZED:
            scale = dev.load_numbers(inverse, chunk)
        if K.DECAYED:
            scale *= since
            dS_j, dz_j, total = dS_j * whole[:, None], dz_j * whole, total * whole
        q_i = num.rounded(q_i * scale[:, None], K.PRECISION, ONCE=True)
        dS_j += num.product(tl.trans(dy_i), q_i, K.PRECISION)
        if K.NORMALIZED:
            dz_j -= tl.sum(q_i.to(tl.float32) * dev.load_numbers(delta, chunk)[:, None], 0)
    first = dev.part(walk) == 0
    (sums,) = dev.states_in(states, walk.states, row, split, K)
    dev.store_state(sums, features, values, tl.trans(dS_j), dz_j, True, first, K)
    tl.store(decays + dev.place(walk) + tl.arange(0, 1), total, mask=dev.where(first, tl.full((1,), True, tl.int1)))


@dev.jit
def enter(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """Write the state that enters each split in the place of the split's own sums: K.C numbers of S in each program,
    and z in the last one.

    If SHARED, all rows that share a state start from it. Otherwise, for gradients, one does, the others from zeros."""
    row, decays = dev.row_of(dev.place(walk), walk), numbers[0]
    (state,) = dev.states_in(states[:1], walk.states, row, 0, K)
    enabled = dev.owns(walk.states[0], row)
    if K.SHARED:
        enabled = enabled | True
    if dev.part(walk) < dev.plain(walk.parts) - 1:
        _enter(state[0], states[1][0], decays, walk, enabled, K.F * K.DV, K)
    else:
        _enter(state[1], states[1][1], decays, walk, enabled, K.F, K)


@dev.jit
def _enter(state, sums, decays, walk, enabled, WIDTH: tl.constexpr, K: tl.constexpr):
    splits = dev.plain(walk.splits)
    numbers, inside = dev.channels(dev.part(walk) % tl.cdiv(WIDTH, K.C), WIDTH, K.C)
    x = tl.load(state + numbers, mask=dev.where(enabled, inside), other=0)
    # loads of later splits do not wait for stores of earlier ones: the stages of this loop are known to be apart
    for i in tl.range(0, splits, num_stages=4):
        split = i
        if K.REVERSE:
            split = splits - 1 - i
        here = dev.place(walk).to(tl.int64) * splits + split
        places = sums + here * WIDTH + numbers
        own = tl.load(places, mask=inside, other=0)
        tl.store(places, x, mask=inside)
        x = x * tl.load(decays + here) + own
