"""The kernels of the causal gradients, whose programs walk as those of `causal_kernels.py` do: queries' gradients from
the first chunk to the last, with the state, and keys' and values' from the last to the first, with its gradient.

Tensor cores give a warp the more of a product, the fewer rows it has: each of two groups of warps would compute all of
64 × 128. Where a program has more channels than tokens, tiles of tokens and channels are therefore TURNED, and only
those of tokens by tokens are computed twice."""

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
    TURNED: tl.constexpr = BF > C
    places = tl.arange(0, C)
    features, values = dev.channels(dev.part(walk), F, BF), dev.channels(0, DV, BV)
    q, k, v, dy, dq = dev.in_row((q, k, v, dy, dq), row, UNIT)
    key_mask, log_decay = dev.in_row((key_mask, log_decay), row, 1)
    decay = dev.fields_of(log_decay, walk)
    inverse, delta = dev.per_token(inverse, walk, SUMS), dev.per_token(delta, walk, SUMS)
    crossing = dev.per_token(crossing, walk, True)
    S_i, z_i = dev.load_state(state, row, split, features, values, True, F, DV)
    # without TURNED transposed, so that neither vᵀ nor φ(k) passes registers on its way to the tensor cores
    S_i, z_i = num.turned(S_i, not TURNED), tl.broadcast_to(z_i[:, None], (BF, num.COLUMNS))
    for start in range(begin, stop, C):
        tokens = dev.chunk(start, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        scale, since, delta_i = tl.full((C,), 1, tl.float32), tl.full((C,), 1, tl.float32), tl.zeros((C,), tl.float32)
        if DECAYED:
            since, until, whole = dev.load_decay(decay, tokens)
        k_j, v_j = dev.load_keys(k, v, tokens, features, values, present, PHI, MASKED, PRECISION)
        dy_i = num.rounded(dev.load(dy, tokens, values), PRECISION)
        visible, ones, k_end = places[:, None] >= places[None, :], num.count(present, PRECISION), k_j
        if DECAYED:
            visible, weight = dev.between(decay, tokens, PRECISION, KEYS_FIRST=False)
            k_end = num.rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
        from_state = num.product_with_state(dy_i, S_i, NORMALIZED or DECAYED, TURNED, PRECISION)
        x = num.turned(num.beside(dev.load(q, tokens, features), num.turned(from_state, TURNED)), TURNED)
        y = num.rounded(dev.map_queries(x, features, present, PHI, MASKED, TURNED), PRECISION, ONCE=True)
        q_i = num.turned(y, TURNED)
        if SUMS:
            from_z = tl.sum(num.product(q_i, num.in_columns(z_i, PRECISION), PRECISION), 1)
        # what a query does not see may be infinite
        if SUMS or DECAYED:
            A = num.product(q_i, tl.trans(k_j), PRECISION)
            A = tl.where(visible, A * weight if DECAYED else A, 0.0)
            if not DECAYED:
                # as in `forward`; for the gradient of a decay, both kernels have to multiply the same numbers
                A = num.rounded(A, PRECISION, ONCE=True)
        if SUMS:
            d_i = tl.sum(num.wide(A), 1) + from_z * since
        G = num.product(dy_i, tl.trans(v_j), PRECISION)
        if SUMS:
            A = num.beside(A, G)
            delta_i = tl.sum(A * G, 1) + tl.sum(num.wide(y) * from_state, 0 if TURNED else 1) * since
            if GRADIENT:
                scale = num.one_over(d_i)
                delta_i *= scale
            dev.store_numbers(inverse, tokens, scale if GRADIENT else d_i)
            dev.store_numbers(delta, tokens, delta_i)
        if GRADIENT:
            if NORMALIZED and not SUMS:
                scale, delta_i = dev.load_numbers(inverse, tokens), dev.load_numbers(delta, tokens)
            G -= delta_i[:, None]
            if NORMALIZED:
                from_state -= dev.along_tokens(delta_i, TURNED) * dev.along_features(tl.max(z_i, 1), TURNED)
            if DECAYED:
                # rounded as in the sums over queries of `key_gradients`, so that both count the same
                q_end = num.beside(y, from_state) * dev.along_tokens(scale * since, TURNED)
                q_end = num.wide(num.rounded(q_end, PRECISION))
                before = tl.where(places[:, None] > places[None, :], A * G, 0.0)
                crossed = tl.sum(before, 1) * scale + tl.sum(q_end * from_state, 0 if TURNED else 1)
                dev.store_numbers(crossing, tokens, crossed)
                G *= weight
                from_state *= dev.along_tokens(since, TURNED)
            G = tl.where(visible, G, 0.0)
            dq_i = num.turned_product(num.rounded(G, PRECISION), k_j, TURNED, PRECISION) + from_state
            slope = DERIVATIVE(x, num.beside(y, dq_i))
            if MASKED:
                slope = tl.where(dev.along_tokens(present, TURNED) | (tl.abs(slope) < float("inf")), slope, 0.0)
            dq_i *= dev.along_tokens(scale, TURNED) * slope
            dev.store(dq, tokens, features, dq_i, TURNED)
        if DECAYED:
            S_i, z_i = S_i * whole[:, None], z_i * whole[:, None]
        S_i += num.turned_product(tl.trans(v_j), k_end, TURNED, PRECISION)
        z_i += num.product(tl.trans(k_end), ones, PRECISION)


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
    TURNED: tl.constexpr = (BF > C) & (BV > C)
    places = tl.arange(0, C)
    features = dev.channels(0 if VALUES else dev.part(walk), F, BF)
    values = dev.channels(0 if KEYS else dev.part(walk), DV, BV)
    q, k, v, dy, dk, dv = dev.in_row((q, k, v, dy, dk, dv), row, UNIT)
    key_mask, log_decay = dev.in_row((key_mask, log_decay), row, 1)
    decay = dev.fields_of(log_decay, walk)
    inverse, delta = dev.per_token(inverse, walk, False), dev.per_token(delta, walk, False)
    crossing = dev.per_token(crossing, walk, True)
    # of rows that share a state, the first one gets its gradient; the others begin with none
    given = dev.owns(dstate, row)
    dS_j, dz_j = dev.load_state(dstate, row, split, features, values, given, F, DV)
    # each row of it is a number that is the sum of its columns
    dz_j = tl.where(tl.arange(0, num.COLUMNS)[None, :] == 0, dz_j[:, None], 0.0)
    dS_j = num.turned(dS_j, not TURNED)
    minus = num.rounded(tl.full((C, num.COLUMNS), -1, tl.float32), PRECISION)
    chunks = tl.cdiv(stop - begin, C)
    for i in range(0, chunks):
        tokens = dev.chunk(begin + (chunks - 1 - i) * C, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        if DECAYED:
            since, until, whole = dev.load_decay(decay, tokens)
        mine = dev.along_tokens(present, TURNED)
        if KEYS:
            v_j = dev.load_values(v, tokens, values, present, MASKED, PRECISION)
            from_state = num.product_with_state(v_j, dS_j, NORMALIZED or DECAYED, TURNED, PRECISION)
            x = num.turned(num.beside(dev.load(k, tokens, features), num.turned(from_state, TURNED)), TURNED)
        else:
            x = num.turned(dev.load(k, tokens, features).to(tl.float32), TURNED)
        y = dev.along_features(features[1], TURNED)
        y = num.rounded(dev.mapped(x, mine & y if MASKED else y, PHI), PRECISION, ONCE=True)
        k_j = num.turned(y, TURNED)
        k_end, y_end = k_j, y
        # row j, column i; what a key is not seen by may be infinite
        visible = places[:, None] <= places[None, :]
        if DECAYED:
            y_end = num.rounded(num.wide(y) * dev.along_tokens(until, TURNED), PRECISION)
            k_end = num.turned(y_end, TURNED)
        if VALUES:
            # before the queries are there, as all of them together would exceed shared memory
            dS = num.rounded(num.turned(dS_j, not TURNED), PRECISION)
            dv_j = num.turned_product(k_end, dS, TURNED, PRECISION)
        q_i = dev.load_queries(q, tokens, features, present, PHI, MASKED)
        dy_i = num.rounded(dev.load(dy, tokens, values), PRECISION)
        scale = tl.full((C,), 1, tl.float32)
        if NORMALIZED:
            scale = dev.load_numbers(inverse, tokens)
            delta_i = tl.broadcast_to(dev.load_numbers(delta, tokens)[:, None], (C, num.COLUMNS))
            delta_i = num.in_columns(delta_i, PRECISION)
        if DECAYED:
            q_i = num.rounded(q_i, PRECISION, ONCE=True)
            visible, weight = dev.between(decay, tokens, PRECISION, KEYS_FIRST=True)
            weight *= scale[None, :]
            q_end = num.rounded(num.wide(q_i) * (scale * since)[:, None], PRECISION)
        else:
            q_i = num.rounded(q_i * scale[:, None], PRECISION, ONCE=True)
            q_end = q_i
        if VALUES or DECAYED:
            A = num.product(k_j, tl.trans(q_i), PRECISION)
        if VALUES:
            weighted = num.rounded(tl.where(visible, A * weight if DECAYED else A, 0.0), PRECISION)
            dv_j += num.turned_product(weighted, dy_i, TURNED, PRECISION)
            dev.store(dv, tokens, values, tl.where(mine, dv_j, 0.0) if MASKED else dv_j, TURNED)
        if KEYS:
            G = num.product(v_j, tl.trans(dy_i), PRECISION)
            if NORMALIZED:
                G += num.product(minus, tl.trans(delta_i), PRECISION)
            G = tl.where(visible, G * weight if DECAYED else G, 0.0)
            from_state += dev.along_features(tl.sum(dz_j, 1), TURNED)
            if DECAYED:
                after = tl.where(places[:, None] < places[None, :], A * G, 0.0)
                crossed = tl.sum(after, 1) + tl.sum(num.wide(y_end) * from_state, 0 if TURNED else 1)
                dev.store_numbers(crossing, tokens, crossed)
                from_state *= dev.along_tokens(until, TURNED)
            dk_j = num.turned_product(num.rounded(G, PRECISION), q_i, TURNED, PRECISION) + from_state
            dk_j *= DERIVATIVE(x, num.beside(y, dk_j))
            dev.store(dk, tokens, features, tl.where(mine, dk_j, 0.0) if MASKED else dk_j, TURNED)
        if DECAYED:
            dS_j, dz_j = dS_j * whole[:, None], dz_j * whole[:, None]
        dS_j += num.turned_product(tl.trans(dy_i), q_end, TURNED, PRECISION)
        if NORMALIZED:
            dz_j -= num.product(tl.trans(q_end), delta_i, PRECISION)
    # one for each row, to be summed over rows that share a state
    dS_j, dz_j, first = num.turned(dS_j, not TURNED), tl.sum(dz_j, 1), (split == 0) & KEYS
    dev.store_state(dstart, row, 0, features, values, dS_j, dz_j, first, True, F, DV)
