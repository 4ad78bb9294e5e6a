"""The small passes around splits of a sequence: the sums of each split by itself, and the states that enter it."""

import triton.language as tl

from linattn.ops.backends.triton import arithmetic as num
from linattn.ops.backends.triton import device as dev


@dev.jit
def key_sums(
    k, v, key_mask, log_decay, sums, kept, walk,
    PHI: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Σ φ(k) vᵀ and Σ φ(k) of a split, and the decay over it all. BF covers all features."""
    row, split, begin, stop = dev.span(walk)
    features, values = dev.channels(0, F, BF), dev.channels(dev.part(walk), DV, BV)
    k, v = dev.in_row((k, v), row, UNIT)
    key_mask, log_decay = dev.in_row((key_mask, log_decay), row, 1)
    decay = dev.fields_of(log_decay, walk)
    # transposed, as in `query_gradient`; and no operand of a product stays in registers from chunk to chunk
    S_i, z_i, left = tl.zeros((BV, BF), tl.float32), tl.zeros((BF,), tl.float32), tl.full((1,), 1, tl.float32)
    for start in range(begin, stop, C):
        tokens = dev.chunk(start, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        if DECAYED:
            _, until, whole = dev.load_decay(decay, tokens)
        k_j, v_j = dev.load_keys(k, v, tokens, features, values, present, PHI, MASKED, PRECISION)
        if DECAYED:
            k_j = num.rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
            S_i, z_i, left = S_i * whole[:, None], z_i * whole, left * whole
        S_i += num.product(tl.trans(v_j), k_j, PRECISION)
        z_i += tl.sum(tl.where(present[:, None], k_j.to(tl.float32), 0.0), 0)
    first = dev.part(walk) == 0
    dev.store_state(sums, row, split, features, values, tl.trans(S_i), z_i, True, first, F, DV)
    tl.store(kept + dev.place(walk) + tl.arange(0, 1), left, mask=first)


@dev.jit
def query_sums(
    q, dy, key_mask, log_decay, inverse, delta, sums, kept, walk,
    PHI: tl.constexpr, NORMALIZED: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sum what a split's queries give to the gradient of the state before it: Σ φ(q) dyᵀ and −Σ φ(q) δ."""
    row, split, begin, stop = dev.span(walk)
    features, values = dev.channels(0, F, BF), dev.channels(dev.part(walk), DV, BV)
    q, dy = dev.in_row((q, dy), row, UNIT)
    key_mask, log_decay = dev.in_row((key_mask, log_decay), row, 1)
    decay = dev.fields_of(log_decay, walk)
    inverse, delta = dev.per_token(inverse, walk, False), dev.per_token(delta, walk, False)
    dS_j, dz_j, left = tl.zeros((BV, BF), tl.float32), tl.zeros((BF,), tl.float32), tl.full((1,), 1, tl.float32)
    chunks = tl.cdiv(stop - begin, C)
    for i in range(0, chunks):
        tokens = dev.chunk(begin + (chunks - 1 - i) * C, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        if DECAYED:
            since, _, whole = dev.load_decay(decay, tokens)
        q_i = dev.load_queries(q, tokens, features, present, PHI, MASKED)
        dy_i = num.rounded(dev.load(dy, tokens, values), PRECISION)
        scale = tl.where(tokens[1], 1.0, 0.0)
        if NORMALIZED:
            scale = dev.load_numbers(inverse, tokens)
        if DECAYED:
            scale *= since
            dS_j, dz_j, left = dS_j * whole[:, None], dz_j * whole, left * whole
        q_i = num.rounded(q_i * scale[:, None], PRECISION, ONCE=True)
        dS_j += num.product(tl.trans(dy_i), q_i, PRECISION)
        if NORMALIZED:
            dz_j -= tl.sum(q_i.to(tl.float32) * dev.load_numbers(delta, tokens)[:, None], 0)
    first = dev.part(walk) == 0
    dev.store_state(sums, row, split, features, values, tl.trans(dS_j), dz_j, True, first, F, DV)
    tl.store(kept + dev.place(walk) + tl.arange(0, 1), left, mask=first)


@dev.jit
def enter(
    state, sums, kept, walk,
    REVERSE: tl.constexpr, SHARED: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the state that enters each split in the place of the split's own sums: of S, and in the last program of z.

    SHARED: all rows that share a state are given it. Of a gradient, only the first row is given it."""
    row = dev.row_of(dev.place(walk), walk)
    place, given = dev.offset(state, row, 1), dev.owns(state, row)
    if SHARED:
        given = given | True
    if dev.part(walk) < dev.plain(walk.parts) - 1:
        _enter(state.S + place * F * DV, sums.S, kept, walk, given, REVERSE, F * DV, B)
    else:
        _enter(state.z + place * F, sums.z, kept, walk, given, REVERSE, F, B)


@dev.jit
def _enter(state, sums, kept, walk, given, REVERSE: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr):
    splits = dev.plain(walk.splits)
    numbers, inside = dev.channels(dev.part(walk) % tl.cdiv(WIDTH, B), WIDTH, B)
    x = tl.load(state + numbers, mask=inside & given, other=0)
    # loads of later splits do not wait for stores of earlier ones: the stages of this loop are known to be apart
    for i in tl.range(0, splits, num_stages=4):
        split = i
        if REVERSE:
            split = splits - 1 - i
        here = dev.place(walk).to(tl.int64) * splits + split
        places = sums + here * WIDTH + numbers
        own = tl.load(places, mask=inside, other=0)
        tl.store(places, x, mask=inside)
        x = x * tl.load(kept + here) + own
