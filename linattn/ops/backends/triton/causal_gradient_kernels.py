"""The kernels of the causal gradients, whose programs walk as those of `causal_kernels.py` do: queries' gradients from
the first chunk to the last, with the state, and keys' and values' from the last to the first, with its gradient."""

# constants decide which branches are compiled, and so which names are bound
# pyright: reportPossiblyUnboundVariable=false, reportUnboundVariable=false

import triton.language as tl

from linattn.ops.backends.triton import arithmetic as num
from linattn.ops.backends.triton import device as dev


@dev.jit
def query_gradient(
    q, k, v, dy, dq, key_mask, log_decay, state, inverse, delta, crossing, walk,
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
    row, split, begin, stop = dev.span(walk)
    places = tl.arange(0, C)
    features, values = dev.channels(dev.part(walk), F, BF), dev.channels(0, DV, BV)
    q, k, v, dy, dq = dev.in_row((q, k, v, dy, dq), row, UNIT)
    key_mask, log_decay = dev.in_row((key_mask, log_decay), row, 1)
    inverse, delta = dev.per_token(inverse, walk, SUMS), dev.per_token(delta, walk, SUMS)
    crossing = dev.per_token(crossing, walk, True)
    S_i, z_i = dev.load_state(state, row, split, features, values, True, F, DV)
    # transposed, so that neither vᵀ nor φ(k) passes registers on its way to the tensor cores
    S_i = tl.trans(S_i)
    for start in range(begin, stop, C):
        tokens = dev.chunk(start, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        k_j, v_j = dev.load_keys(k, v, tokens, features, values, present, PHI, MASKED, PRECISION)
        dy_i = num.rounded(dev.load(dy, tokens, values), PRECISION)
        x = dev.load(q, tokens, features)
        visible = places[:, None] >= places[None, :]
        scale, since, k_end = tl.where(tokens[1], 1.0, 0.0), tl.where(tokens[1], 1.0, 0.0), k_j
        delta_i = scale * 0
        if DECAYED:
            since, until, whole, sums = dev.load_decay(log_decay, tokens)
            weight = dev.between(sums, visible, KEYS_FIRST=False)
            k_end = num.rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
        q_i = dev.load_queries(q, tokens, features, present, PHI, MASKED, PRECISION)
        # what a query does not see may be infinite
        if SUMS or DECAYED:
            A = tl.where(visible, num.product(q_i, tl.trans(k_j), PRECISION), 0.0)
            if DECAYED:
                A *= weight
        G = num.product(dy_i, tl.trans(v_j), PRECISION)
        from_state = num.product_with_state(dy_i, S_i, NORMALIZED or DECAYED, PRECISION)
        if SUMS:
            d_i = tl.sum(A, 1) + tl.sum(q_i.to(tl.float32) * z_i[None, :], 1) * since
            delta_i = tl.sum(tl.where(visible, A * G, 0.0), 1) + tl.sum(q_i.to(tl.float32) * from_state, 1) * since
            if GRADIENT:
                scale = num.one_over(d_i)
                delta_i *= scale
            dev.store_numbers(inverse, tokens, scale if GRADIENT else d_i)
            dev.store_numbers(delta, tokens, delta_i)
        if GRADIENT:
            if NORMALIZED and not SUMS:
                scale, delta_i = dev.load_numbers(inverse, tokens), dev.load_numbers(delta, tokens)
            G = tl.where(visible, G - delta_i[:, None], 0.0)
            if NORMALIZED:
                from_state -= delta_i[:, None] * z_i[None, :]
            if DECAYED:
                # rounded as in the sums over queries of `key_gradients`, so that both count the same
                q_end = num.rounded(q_i.to(tl.float32) * (scale * since)[:, None], PRECISION).to(tl.float32)
                before = tl.where(places[:, None] > places[None, :], A * G, 0.0)
                dev.store_numbers(crossing, tokens, tl.sum(before, 1) * scale + tl.sum(q_end * from_state, 1))
                G *= weight
                from_state *= since[:, None]
            dq_i = (num.product(num.rounded(G, PRECISION), k_j, PRECISION) + from_state) * scale[:, None]
            slope = DERIVATIVE(x.to(tl.float32), q_i.to(tl.float32))
            if MASKED:
                slope = tl.where(present[:, None] | (tl.abs(slope) < float("inf")), slope, 0.0)
            dev.store(dq, tokens, features, dq_i * slope)
        if DECAYED:
            S_i, z_i = S_i * whole, z_i * whole
        S_i += num.product(tl.trans(v_j), k_end, PRECISION)
        z_i += tl.sum(k_end.to(tl.float32), 0)


@dev.jit
def key_gradients(
    q, k, v, dy, dk, dv, key_mask, log_decay, dstate, inverse, delta, crossing, dstart, walk,
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
    row, split, begin, stop = dev.span(walk)
    places = tl.arange(0, C)
    features = dev.channels(0 if VALUES else dev.part(walk), F, BF)
    values = dev.channels(0 if KEYS else dev.part(walk), DV, BV)
    q, k, v, dy, dk, dv = dev.in_row((q, k, v, dy, dk, dv), row, UNIT)
    key_mask, log_decay = dev.in_row((key_mask, log_decay), row, 1)
    inverse, delta = dev.per_token(inverse, walk, False), dev.per_token(delta, walk, False)
    crossing = dev.per_token(crossing, walk, True)
    # of rows that share a state, the first one gets its gradient; the others begin with none
    given = dev.owns(dstate, row)
    dS_j, dz_j = dev.load_state(dstate, row, split, features, values, given, F, DV)
    # transposed, as in `query_gradient`
    dS_j = tl.trans(dS_j)
    chunks = tl.cdiv(stop - begin, C)
    for i in range(0, chunks):
        tokens = dev.chunk(begin + (chunks - 1 - i) * C, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        q_i = dev.load_queries(q, tokens, features, present, PHI, MASKED, PRECISION)
        dy_i = num.rounded(dev.load(dy, tokens, values), PRECISION)
        x = dev.load(k, tokens, features).to(tl.float32)
        # features[1] is a constant if F fills the tile: φ is then computed in the layout of products, and spills
        k_j = dev.mapped(x, dev.both(present, features[0] < F), PHI, PRECISION)
        scale = tl.where(tokens[1], 1.0, 0.0)
        delta_i = scale * 0
        if NORMALIZED:
            scale, delta_i = dev.load_numbers(inverse, tokens), dev.load_numbers(delta, tokens)
        # row j, column i; what a key is not seen by may be infinite
        visible = places[:, None] <= places[None, :]
        if DECAYED:
            since, until, whole, sums = dev.load_decay(log_decay, tokens)
            weight = scale[None, :] * dev.between(sums, visible, KEYS_FIRST=True)
            q_end, k_end = scale * since, num.rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
            q_end = num.rounded(q_i.to(tl.float32) * q_end[:, None], PRECISION)
        else:
            q_i = num.rounded(q_i.to(tl.float32) * scale[:, None], PRECISION)
            q_end, k_end = q_i, k_j
        if VALUES or DECAYED:
            A = num.product(k_j, tl.trans(q_i), PRECISION)
        if KEYS:
            v_j = num.rounded(tl.where(present[:, None], dev.load(v, tokens, values), 0.0), PRECISION)
            G = tl.where(visible, num.product(v_j, tl.trans(dy_i), PRECISION) - delta_i[None, :], 0.0)
            from_state = num.product_with_state(v_j, dS_j, NORMALIZED or DECAYED, PRECISION) + dz_j[None, :]
            if DECAYED:
                G *= weight
                after = tl.where(places[:, None] < places[None, :], A * G, 0.0)
                crossed = tl.sum(after, 1) + tl.sum(k_end.to(tl.float32) * from_state, 1)
                dev.store_numbers(crossing, tokens, crossed)
                from_state *= until[:, None]
            dk_j = num.product(num.rounded(G, PRECISION), q_i, PRECISION) + from_state
            slope = DERIVATIVE(x, k_j.to(tl.float32))
            dev.store(dk, tokens, features, tl.where(present[:, None], dk_j * slope, 0.0))
        if VALUES:
            if DECAYED:
                A *= weight
            A = num.rounded(tl.where(visible, A, 0.0), PRECISION)
            from_state = num.product(k_end, num.rounded(tl.trans(dS_j), PRECISION), PRECISION)
            dv_j = num.product(A, dy_i, PRECISION) + from_state
            dev.store(dv, tokens, values, tl.where(present[:, None], dv_j, 0.0))
        if DECAYED:
            dS_j, dz_j = dS_j * whole, dz_j * whole
        dS_j += num.product(tl.trans(dy_i), q_end, PRECISION)
        if NORMALIZED:
            dz_j -= tl.sum(q_end.to(tl.float32) * delta_i[:, None], 0)
    # one for each row, to be summed over rows that share a state
    dev.store_state(dstart, row, 0, features, values, tl.trans(dS_j), dz_j, (split == 0) & KEYS, True, F, DV)
