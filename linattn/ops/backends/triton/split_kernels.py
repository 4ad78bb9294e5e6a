"""The small passes around splits of a sequence: the sums of each split by itself, and the states that enter it."""

import triton.language as tl

from linattn.ops.backends.triton.causal_kernels import kernel
from linattn.ops.backends.triton.tiles import (
    load,
    load_decay,
    load_features,
    load_present,
    load_queries,
    offset,
    owns,
    product,
    rounded,
)


@kernel
def key_sums(
    k, k0, k1, k2, kn, v, v0, v1, v2, vn, key_mask, m0, m1, m2, mn, log_decay, g0, g1, g2, gn,
    S, z, whole_split, S_unit, z_unit, n, length, splits, size1, size2,
    PHI: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Σ φ(k) vᵀ and Σ φ(k) of a split, and the decay over it all. BF covers all features."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, features = tl.arange(0, C), tl.arange(0, BF)
    values = tl.program_id(1) * BV + tl.arange(0, BV)
    begin = split * length
    stop = tl.minimum(begin + length, n)
    k += offset(row, size1, size2, k0, k1, k2) * UNIT
    v += offset(row, size1, size2, v0, v1, v2) * UNIT
    key_mask += offset(row, size1, size2, m0, m1, m2)
    log_decay += offset(row, size1, size2, g0, g1, g2)
    S_i = tl.zeros((BF, BV), tl.float32)
    z_i = tl.zeros((BF,), tl.float32)
    kept = tl.sum(tl.zeros((C,), tl.float32), 0) + 1
    for start in range(begin, stop, C):
        inside = start + places < stop
        k_j = load_features(k, kn * UNIT, start, inside, features, PHI, PRECISION, F, C, BF)
        v_j = load(v, vn * UNIT, start, inside, values, DV, C, BV)
        if MASKED:
            present = load_present(key_mask, mn, start, inside, C)
            k_j, v_j = tl.where(present[:, None], k_j, 0.0), tl.where(present[:, None], v_j, 0.0)
        if DECAYED:
            _, until, whole, _, _, _ = load_decay(log_decay, gn, start, inside, C)
            k_j = rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
            S_i, z_i, kept = S_i * whole, z_i * whole, kept * whole
        S_i += product(tl.trans(k_j), rounded(v_j, PRECISION), PRECISION)
        z_i += tl.sum(k_j.to(tl.float32), 0)
    unit = tl.program_id(0).to(tl.int64)
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    tl.store(S + unit * S_unit + features[:, None] * DV + values[None, :], S_i, mask=whole_tile)
    tl.store(z + unit * z_unit + features, z_i, mask=(features < F) & (tl.program_id(1) == 0))
    tl.store(whole_split + unit, kept, mask=tl.program_id(1) == 0)


@kernel
def query_sums(
    q, q0, q1, q2, qn, dy, dy0, dy1, dy2, dyn, key_mask, m0, m1, m2, mn, log_decay, g0, g1, g2, gn,
    inverse, delta, dS, dz, whole_split, S_unit, z_unit, n, length, splits, size1, size2,
    PHI: tl.constexpr, NORMALIZED: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sum what a split's queries give to the gradient of the state before it: Σ φ(q) dyᵀ and −Σ φ(q) δ."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, features = tl.arange(0, C), tl.arange(0, BF)
    values = tl.program_id(1) * BV + tl.arange(0, BV)
    begin = split * length
    stop = tl.minimum(begin + length, n)
    q += offset(row, size1, size2, q0, q1, q2) * UNIT
    dy += offset(row, size1, size2, dy0, dy1, dy2) * UNIT
    key_mask += offset(row, size1, size2, m0, m1, m2)
    log_decay += offset(row, size1, size2, g0, g1, g2)
    inverse += row.to(tl.int64) * n
    delta += row.to(tl.int64) * n
    dS_j = tl.zeros((BF, BV), tl.float32)
    dz_j = tl.zeros((BF,), tl.float32)
    kept = tl.sum(tl.zeros((C,), tl.float32), 0) + 1
    chunks = tl.cdiv(stop - begin, C)
    for i in range(0, chunks):
        start = begin + (chunks - 1 - i) * C
        inside = start + places < stop
        present = inside
        if MASKED:
            present = load_present(key_mask, mn, start, inside, C)
        q_i = load_queries(q, qn * UNIT, start, inside, features, present, PHI, MASKED, PRECISION, F, C, BF)
        dy_i = rounded(load(dy, dyn * UNIT, start, inside, values, DV, C, BV), PRECISION)
        scale = tl.where(inside, 1.0, 0.0)
        if NORMALIZED:
            scale = tl.load(inverse + tl.cast(start, tl.int64) + places, mask=inside, other=0)
        if DECAYED:
            since, _, whole, _, _, _ = load_decay(log_decay, gn, start, inside, C)
            scale *= since
            dS_j, dz_j, kept = dS_j * whole, dz_j * whole, kept * whole
        q_i = rounded(q_i.to(tl.float32) * scale[:, None], PRECISION)
        dS_j += product(tl.trans(q_i), dy_i, PRECISION)
        if NORMALIZED:
            delta_i = tl.load(delta + tl.cast(start, tl.int64) + places, mask=inside, other=0)
            dz_j -= tl.sum(q_i.to(tl.float32) * delta_i[:, None], 0)
    unit = tl.program_id(0).to(tl.int64)
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    tl.store(dS + unit * S_unit + features[:, None] * DV + values[None, :], dS_j, mask=whole_tile)
    tl.store(dz + unit * z_unit + features, dz_j, mask=(features < F) & (tl.program_id(1) == 0))
    tl.store(whole_split + unit, kept, mask=tl.program_id(1) == 0)


@kernel
def enter(
    parts, whole_split, S, z, e0, e1, e2, splits, size1, size2,
    REVERSE: tl.constexpr, SHARED: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Writes the states that enter each split in the place of the splits' own sums, S (STATE numbers) and z together.

    SHARED: only the first of the rows that share (S, z) takes it, as is right for gradients."""
    row = tl.program_id(0)
    place = tl.program_id(1) * B + tl.arange(0, B)
    inside = place < WIDTH
    unit = offset(row, size1, size2, e0, e1, e2)
    given = inside
    if not SHARED:
        given = inside & owns(row, size1, size2, e0, e1, e2)
    state = tl.load(S + unit * STATE + place, mask=given & (place < STATE), other=0)
    state += tl.load(z + unit * (WIDTH - STATE) + place - STATE, mask=given & (place >= STATE), other=0)
    for i in range(0, splits):
        split = i
        if REVERSE:
            split = splits - 1 - i
        here = row.to(tl.int64) * splits + split
        part = tl.load(parts + here * WIDTH + place, mask=inside, other=0)
        tl.store(parts + here * WIDTH + place, state, mask=inside)
        state = state * tl.load(whole_split + here) + part
