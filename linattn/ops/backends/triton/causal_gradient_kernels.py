"""The kernels of the causal gradients, whose programs walk as those of `causal_kernels.py` do: queries' gradients from
the first chunk to the last, with the state, and keys' and values' from the last to the first, with its gradient."""

import triton.language as tl

from linattn.ops.backends.triton.causal_kernels import kernel
from linattn.ops.backends.triton.tiles import (
    between,
    load,
    load_decay,
    load_features,
    load_present,
    load_queries,
    mean_value,
    offset,
    one_over,
    owns,
    product,
    product_with_state,
    rounded,
    store,
)


@kernel
def query_gradient(
    q, q0, q1, q2, qn, k, k0, k1, k2, kn, v, v0, v1, v2, vn, dy, dy0, dy1, dy2, dyn, dq, dq0, dq1, dq2, dqn,
    key_mask, m0, m1, m2, mn, log_decay, g0, g1, g2, gn,
    S, z, s0, s1, s2, s3, S_unit, z_unit, inverse, delta, crossing,
    n, length, splits, size1, size2,
    PHI: tl.constexpr, DERIVATIVE: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr,
    NORMALIZED: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dq = (((dy vᵀ − δ) ∘ D) φ(k) + r (dy Sᵀ − δ z)) / d, where d is the denominator. BV covers all values.

    δ is dy·y, computed as δ = (Σ_j A_ij (dy_i·v_j) + r φ(q)·(dy Sᵀ)) / d in float32, from the products that it is then
    subtracted from: y itself has been rounded. With SUMS, 1/d goes to `inverse` and δ to `delta`. A program that has
    only some of the features knows only its shares of d and δ d: then one launch with SUMS writes the shares, and a
    second one with GRADIENT reads 1/d and δ.

    For the gradient of the decay, `crossing` gets Σ_{j<i} M_ij with M_ij = A_ij (dy_i·v_j − δ_i) / d_i, where j counts
    the state's tokens too; again each program its share."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, values = tl.arange(0, C), tl.arange(0, BV)
    features = tl.program_id(1) * BF + tl.arange(0, BF)
    begin = split * length
    stop = tl.minimum(begin + length, n)
    q += offset(row, size1, size2, q0, q1, q2) * UNIT
    k += offset(row, size1, size2, k0, k1, k2) * UNIT
    v += offset(row, size1, size2, v0, v1, v2) * UNIT
    dy += offset(row, size1, size2, dy0, dy1, dy2) * UNIT
    dq += offset(row, size1, size2, dq0, dq1, dq2) * UNIT
    key_mask += offset(row, size1, size2, m0, m1, m2)
    log_decay += offset(row, size1, size2, g0, g1, g2)
    share = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    scalars = share if SUMS else row.to(tl.int64)
    inverse += scalars * n
    delta += scalars * n
    crossing += share * n
    unit = offset(row, size1, size2, s0, s1, s2) + split * s3
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    S_i = tl.load(S + unit * S_unit + features[:, None] * DV + values[None, :], mask=whole_tile, other=0)
    z_i = tl.load(z + unit * z_unit + features, mask=features < F, other=0)
    for start in range(begin, stop, C):
        inside = start + places < stop
        present = inside
        if MASKED:
            present = load_present(key_mask, mn, start, inside, C)
        k_j = load_features(k, kn * UNIT, start, inside, features, PHI, PRECISION, F, C, BF)
        v_j = load(v, vn * UNIT, start, inside, values, DV, C, BV)
        if MASKED:
            k_j, v_j = tl.where(present[:, None], k_j, 0.0), tl.where(present[:, None], v_j, 0.0)
        v_j, dy_i = rounded(v_j, PRECISION), rounded(load(dy, dyn * UNIT, start, inside, values, DV, C, BV), PRECISION)
        visible = places[:, None] >= places[None, :]
        scale, since, k_end = tl.where(inside, 1.0, 0.0), tl.where(inside, 1.0, 0.0), k_j
        if DECAYED:
            since, until, whole, high, low, count = load_decay(log_decay, gn, start, inside, C)
            weight = tl.where(visible, between(high, low, count), 0.0)
            k_end = rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
        # what a query does not see may be infinite
        if SUMS or DECAYED:
            q_i = load_queries(q, qn * UNIT, start, inside, features, present, PHI, MASKED, PRECISION, F, C, BF)
            A = tl.where(visible, product(q_i, tl.trans(k_j), PRECISION), 0.0)
            q_i = q_i.to(tl.float32)
            if DECAYED:
                A *= weight
        G = tl.where(visible, product(dy_i, tl.trans(v_j), PRECISION), 0.0)
        centred = S_i
        if NORMALIZED:
            # dq stays the same when a constant is args off all values: then what is rounded is small
            mean = mean_value(S_i, z_i)
            of_mean = tl.sum(dy_i.to(tl.float32) * mean[None, :], 1)
            G -= of_mean[:, None]
            centred = S_i - z_i[:, None] * mean[None, :]
        from_state = product_with_state(dy_i, tl.trans(centred), DECAYED, PRECISION)
        if SUMS:
            d_i = tl.sum(A, 1) + tl.sum(q_i * z_i[None, :], 1) * since
            delta_i = tl.sum(A * G, 1) + tl.sum(q_i * from_state, 1) * since
            if GRADIENT:
                scale = one_over(d_i)
                delta_i *= scale
                tl.store(inverse + tl.cast(start, tl.int64) + places, scale, mask=inside)
                tl.store(delta + tl.cast(start, tl.int64) + places, delta_i + of_mean, mask=inside)
            else:
                tl.store(inverse + tl.cast(start, tl.int64) + places, d_i, mask=inside)
                tl.store(delta + tl.cast(start, tl.int64) + places, delta_i + d_i * of_mean, mask=inside)
        if GRADIENT:
            if NORMALIZED:
                if not SUMS:
                    scale = tl.load(inverse + tl.cast(start, tl.int64) + places, mask=inside, other=0)
                    delta_i = tl.load(delta + tl.cast(start, tl.int64) + places, mask=inside, other=0) - of_mean
                G = tl.where(visible, G - delta_i[:, None], 0.0)
                from_state -= delta_i[:, None] * z_i[None, :]
            if DECAYED:
                # rounded as in the sums over queries of `key_gradients`, so that both count the same
                q_end = rounded(q_i * (scale * since)[:, None], PRECISION).to(tl.float32)
                before = tl.where(places[:, None] > places[None, :], A * G, 0.0)
                crossed = tl.sum(before, 1) * scale + tl.sum(q_end * from_state, 1)
                tl.store(crossing + tl.cast(start, tl.int64) + places, crossed, mask=inside)
                G *= weight
                from_state *= since[:, None]
            dq_i = (product(rounded(G, PRECISION), k_j, PRECISION) + from_state) * scale[:, None]
            x = load(q, qn * UNIT, start, inside, features, F, C, BF).to(tl.float32)
            slope = DERIVATIVE(x)
            if MASKED:
                slope = tl.where(present[:, None] | (tl.abs(slope) < float("inf")), slope, 0.0)
            store(dq, dqn * UNIT, start, inside, features, dq_i * slope, F, C, BF)
        if DECAYED:
            S_i, z_i = S_i * whole, z_i * whole
        S_i += product(tl.trans(k_end), v_j, PRECISION)
        z_i += tl.sum(k_end.to(tl.float32), 0)


@kernel
def key_gradients(
    q, q0, q1, q2, qn, k, k0, k1, k2, kn, v, v0, v1, v2, vn, dy, dy0, dy1, dy2, dyn,
    dk, dk0, dk1, dk2, dkn, dv, dv0, dv1, dv2, dvn, key_mask, m0, m1, m2, mn, log_decay, g0, g1, g2, gn,
    dS, dz, s0, s1, s2, s3, S_unit, z_unit, e0, e1, e2, inverse, delta, crossing, dS_start, dz_start,
    n, length, splits, size1, size2,
    PHI: tl.constexpr, DERIVATIVE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NORMALIZED: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Run from the last chunk to the first, with dS and dz, the gradients of the state after the chunk:

        dk = (v dyᵀ − δ) ∘ Dᵀ φ(q) + w (v dSᵀ + dz)    dv = (φ(k) φ(q)ᵀ ∘ Dᵀ) dy + w φ(k) dS
        dS ← a dS + (r φ(q))ᵀ dy                       dz ← a dz − (r φ(q))ᵀ δ

    where dy and δ are over the denominators. For KEYS, BV covers all values; for VALUES, BF all features.

    For the gradient of the decay, `crossing` gets Σ_{i>j} M_ij, as in `query_gradient`, where i counts the tokens after
    the call too."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, features, values = tl.arange(0, C), tl.arange(0, BF), tl.arange(0, BV)
    if not VALUES:
        features += tl.program_id(1) * BF
    if not KEYS:
        values += tl.program_id(1) * BV
    begin = split * length
    stop = tl.minimum(begin + length, n)
    q += offset(row, size1, size2, q0, q1, q2) * UNIT
    k += offset(row, size1, size2, k0, k1, k2) * UNIT
    v += offset(row, size1, size2, v0, v1, v2) * UNIT
    dy += offset(row, size1, size2, dy0, dy1, dy2) * UNIT
    dk += offset(row, size1, size2, dk0, dk1, dk2) * UNIT
    dv += offset(row, size1, size2, dv0, dv1, dv2) * UNIT
    key_mask += offset(row, size1, size2, m0, m1, m2)
    log_decay += offset(row, size1, size2, g0, g1, g2)
    inverse += row.to(tl.int64) * n
    delta += row.to(tl.int64) * n
    crossing += (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * n
    unit = offset(row, size1, size2, s0, s1, s2) + split * s3
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    tile = features[:, None] * DV + values[None, :]
    # of rows that share a state, the first one takes its gradient; the others begin with none
    given = (splits > 1) | owns(row, size1, size2, e0, e1, e2)
    dS_j = tl.load(dS + unit * S_unit + tile, mask=whole_tile & given, other=0)
    dz_j = tl.load(dz + unit * z_unit + features, mask=(features < F) & given, other=0)
    chunks = tl.cdiv(stop - begin, C)
    for i in range(0, chunks):
        start = begin + (chunks - 1 - i) * C
        inside = start + places < stop
        present = inside
        if MASKED:
            present = load_present(key_mask, mn, start, inside, C)
        q_i = load_queries(q, qn * UNIT, start, inside, features, present, PHI, MASKED, PRECISION, F, C, BF)
        dy_i = rounded(load(dy, dyn * UNIT, start, inside, values, DV, C, BV), PRECISION)
        x = load(k, kn * UNIT, start, inside, features, F, C, BF).to(tl.float32)
        k_j = rounded(tl.where(present[:, None] & (features < F)[None, :], PHI(x), 0.0), PRECISION)
        scale = tl.where(inside, 1.0, 0.0)
        delta_i = scale * 0
        if NORMALIZED:
            scale = tl.load(inverse + tl.cast(start, tl.int64) + places, mask=inside, other=0)
            delta_i = tl.load(delta + tl.cast(start, tl.int64) + places, mask=inside, other=0)
        # row j, column i
        weight = tl.where(places[:, None] <= places[None, :], scale[None, :], 0.0)
        q_end, k_end = scale, k_j
        if DECAYED:
            since, until, whole, high, low, count = load_decay(log_decay, gn, start, inside, C)
            weight = tl.where(places[:, None] <= places[None, :], weight * tl.trans(between(high, low, count)), 0.0)
            q_end, k_end = scale * since, rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
        if KEYS and DECAYED:
            A = product(k_j, tl.trans(q_i), PRECISION)
        if KEYS:
            v_j = load(v, vn * UNIT, start, inside, values, DV, C, BV)
            v_j = rounded(tl.where(present[:, None], v_j, 0.0), PRECISION)
            G = product(v_j, tl.trans(dy_i), PRECISION) - delta_i[None, :]
            # what a key is not seen by may be infinite
            G = tl.where(places[:, None] <= places[None, :], G * weight, 0.0)
            if NORMALIZED and not DECAYED:
                mean = tl.sum(v_j.to(tl.float32), 0) / C
                centred = rounded(v_j.to(tl.float32) - mean[None, :], PRECISION)
                from_state = product(centred, tl.trans(rounded(dS_j, PRECISION)), PRECISION)
                from_state += (dz_j + tl.sum(dS_j * mean[None, :], 1))[None, :]
            else:
                from_state = product_with_state(v_j, tl.trans(dS_j), DECAYED, PRECISION) + dz_j[None, :]
            if DECAYED:
                after = tl.where(places[:, None] < places[None, :], A * G, 0.0)
                crossed = tl.sum(after, 1) + tl.sum(k_end.to(tl.float32) * from_state, 1)
                tl.store(crossing + tl.cast(start, tl.int64) + places, crossed, mask=inside)
                from_state *= until[:, None]
            dk_j = product(rounded(G, PRECISION), q_i, PRECISION) + from_state
            dk_j = tl.where(present[:, None], dk_j * DERIVATIVE(x), 0.0)
            store(dk, dkn * UNIT, start, inside, features, dk_j, F, C, BF)
        if VALUES:
            if not (KEYS and DECAYED):
                A = product(k_j, tl.trans(q_i), PRECISION)
            A = rounded(tl.where(places[:, None] <= places[None, :], A * weight, 0.0), PRECISION)
            from_state = product(k_end, rounded(dS_j, PRECISION), PRECISION)
            dv_j = tl.where(present[:, None], product(A, dy_i, PRECISION) + from_state, 0.0)
            store(dv, dvn * UNIT, start, inside, values, dv_j, DV, C, BV)
        q_end = rounded(q_i.to(tl.float32) * q_end[:, None], PRECISION)
        if DECAYED:
            dS_j, dz_j = dS_j * whole, dz_j * whole
        dS_j += product(tl.trans(q_end), dy_i, PRECISION)
        if NORMALIZED:
            dz_j -= tl.sum(q_end.to(tl.float32) * delta_i[:, None], 0)
    # one for each row, to be summed over rows that share a state
    begins = (split == 0) & KEYS
    tl.store(dS_start + row.to(tl.int64) * F * DV + tile, dS_j, mask=whole_tile & begins)
    tl.store(dz_start + row.to(tl.int64) * F + features, dz_j, mask=(features < F) & begins)
