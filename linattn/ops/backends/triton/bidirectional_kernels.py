"""The kernels of attention to all keys, where the state is whole before it is asked; sums are in `split_kernels.py`.

    y = φ(q) S / (φ(q)·z)    dq = (dy Sᵀ − δ z) / (φ(q)·z)    dk = v dSᵀ + dz    dv = φ(k) dS

A program has some tokens of one row and some channels, and reads its part of the state once."""

import triton.language as tl

from linattn.ops.backends.triton.causal_kernels import kernel
from linattn.ops.backends.triton.tiles import (
    load,
    load_features,
    load_present,
    mean_value,
    offset,
    one_over,
    product,
    product_with_state,
    rounded,
    store,
)


@kernel
def read(
    q, q0, q1, q2, qn, y, y0, y1, y2, yn, S, z, e0, e1, e2, n, length, splits, size1, size2,
    PHI: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, features = tl.arange(0, C), tl.arange(0, BF)
    values = tl.program_id(1) * BV + tl.arange(0, BV)
    stop = tl.minimum(split * length + length, n)
    q += offset(row, size1, size2, q0, q1, q2) * UNIT
    y += offset(row, size1, size2, y0, y1, y2) * UNIT
    unit = offset(row, size1, size2, e0, e1, e2)
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    sums = tl.load(S + unit * F * DV + features[:, None] * DV + values[None, :], mask=whole_tile, other=0)
    sums = rounded(sums, PRECISION)
    total = tl.load(z + unit * F + features, mask=features < F, other=0)
    for start in range(split * length, stop, C):
        inside = start + places < stop
        q_i = load_features(q, qn * UNIT, start, inside, features, PHI, PRECISION, F, C, BF)
        y_i = product(q_i, sums, PRECISION)
        if NORMALIZED:
            y_i *= one_over(tl.sum(q_i.to(tl.float32) * total[None, :], 1))[:, None]
        store(y, yn * UNIT, start, inside, values, y_i, DV, C, BV)


@kernel
def read_gradient(
    q, q0, q1, q2, qn, dy, dy0, dy1, dy2, dyn, dq, dq0, dq1, dq2, dqn,
    S, z, e0, e1, e2, inverse, delta, n, length, splits, size1, size2,
    PHI: tl.constexpr, DERIVATIVE: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr, NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dq, and for the gradient of the sums 1/d and δ = φ(q)·(dy Sᵀ) / d. BV covers all values. SUMS and GRADIENT mean
    the same as in the causal `query_gradient`."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, values = tl.arange(0, C), tl.arange(0, BV)
    features = tl.program_id(1) * BF + tl.arange(0, BF)
    stop = tl.minimum(split * length + length, n)
    q += offset(row, size1, size2, q0, q1, q2) * UNIT
    dy += offset(row, size1, size2, dy0, dy1, dy2) * UNIT
    dq += offset(row, size1, size2, dq0, dq1, dq2) * UNIT
    scalars = row.to(tl.int64)
    if SUMS:
        scalars = scalars * tl.num_programs(1) + tl.program_id(1)
    inverse += scalars * n
    delta += scalars * n
    unit = offset(row, size1, size2, e0, e1, e2)
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    sums = tl.load(S + unit * F * DV + features[:, None] * DV + values[None, :], mask=whole_tile, other=0)
    total = tl.load(z + unit * F + features, mask=features < F, other=0)
    mean = tl.zeros((BV,), tl.float32)
    if NORMALIZED:
        # as in the causal `query_gradient`
        mean = mean_value(sums, total)
        sums -= total[:, None] * mean[None, :]
    sums = rounded(sums, PRECISION)
    for start in range(split * length, stop, C):
        inside = start + places < stop
        dy_i = load(dy, dyn * UNIT, start, inside, values, DV, C, BV)
        x = load(q, qn * UNIT, start, inside, features, F, C, BF).to(tl.float32)
        dq_i = product(rounded(dy_i, PRECISION), tl.trans(sums), PRECISION)
        of_mean = tl.sum(dy_i.to(tl.float32) * mean[None, :], 1)
        if SUMS:
            q_i = tl.where((features < F)[None, :], rounded(PHI(x), PRECISION).to(tl.float32), 0.0)
            scale, delta_i = tl.sum(q_i * total[None, :], 1), tl.sum(q_i * dq_i, 1)
            share = delta_i + scale * of_mean
            if GRADIENT:
                scale = one_over(scale)
                delta_i *= scale
                share = delta_i + of_mean
            tl.store(inverse + tl.cast(start, tl.int64) + places, scale, mask=inside)
            tl.store(delta + tl.cast(start, tl.int64) + places, share, mask=inside)
        if GRADIENT:
            if NORMALIZED:
                if not SUMS:
                    scale = tl.load(inverse + tl.cast(start, tl.int64) + places, mask=inside, other=0)
                    delta_i = tl.load(delta + tl.cast(start, tl.int64) + places, mask=inside, other=0) - of_mean
                dq_i = (dq_i - delta_i[:, None] * total[None, :]) * scale[:, None]
            store(dq, dqn * UNIT, start, inside, features, dq_i * DERIVATIVE(x), F, C, BF)


@kernel
def key_sums_gradient(
    k, k0, k1, k2, kn, v, v0, v1, v2, vn, dk, dk0, dk1, dk2, dkn, dv, dv0, dv1, dv2, dvn, key_mask, m0, m1, m2, mn,
    dS, dz, e0, e1, e2, n, length, splits, size1, size2,
    PHI: tl.constexpr, DERIVATIVE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """For KEYS, BV covers all values; for VALUES, BF all features."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, features, values = tl.arange(0, C), tl.arange(0, BF), tl.arange(0, BV)
    if not VALUES:
        features += tl.program_id(1) * BF
    if not KEYS:
        values += tl.program_id(1) * BV
    stop = tl.minimum(split * length + length, n)
    k += offset(row, size1, size2, k0, k1, k2) * UNIT
    v += offset(row, size1, size2, v0, v1, v2) * UNIT
    dk += offset(row, size1, size2, dk0, dk1, dk2) * UNIT
    dv += offset(row, size1, size2, dv0, dv1, dv2) * UNIT
    key_mask += offset(row, size1, size2, m0, m1, m2)
    unit = offset(row, size1, size2, e0, e1, e2)
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    sums = tl.load(dS + unit * F * DV + features[:, None] * DV + values[None, :], mask=whole_tile, other=0)
    total = tl.load(dz + unit * F + features, mask=features < F, other=0)
    for start in range(split * length, stop, C):
        inside = start + places < stop
        present = inside
        if MASKED:
            present = load_present(key_mask, mn, start, inside, C)
        x = load(k, kn * UNIT, start, inside, features, F, C, BF).to(tl.float32)
        if KEYS:
            v_j = load(v, vn * UNIT, start, inside, values, DV, C, BV)
            v_j = rounded(tl.where(present[:, None], v_j, 0.0), PRECISION)
            dk_j = (product_with_state(v_j, tl.trans(sums), True, PRECISION) + total[None, :]) * DERIVATIVE(x)
            store(dk, dkn * UNIT, start, inside, features, tl.where(present[:, None], dk_j, 0.0), F, C, BF)
        if VALUES:
            k_j = rounded(tl.where(present[:, None] & (features < F)[None, :], PHI(x), 0.0), PRECISION)
            dv_j = product(k_j, rounded(sums, PRECISION), PRECISION)
            store(dv, dvn * UNIT, start, inside, values, tl.where(present[:, None], dv_j, 0.0), DV, C, BV)
