"""The kernels of the causal gradients (arguments: device.py; symbols: fast/linear.py). For queries, programs walk from
the first chunk to the last with the state; for keys and values, back to the first with its gradient.

The fewer rows a product has, the more of it a warp computes on tensor cores: each of two groups of warps would compute
all of 64 × 128. Where a program has more channels than tokens, it therefore transposes tiles of tokens and channels,
and only tiles of tokens by tokens are computed twice."""

# type checkers do not see that the constant K is a record
# pyright: reportAttributeAccessIssue=false
# nor that `tl.range` is iterated over
# pyright: reportGeneralTypeIssues=false
# constants decide which branches are compiled, and so which names are bound
# pyright: reportPossiblyUnboundVariable=false, reportUnboundVariable=false, reportAssignmentType=false

import triton.language as tl

from linattn.ops.triton import arithmetic as num
from linattn.ops.triton import device as dev


@dev.jit
def query_gradient(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """dq = (((dy vᵀ − δ) ∘ D) φ(k) + r (dy Sᵀ − δ z)) / d, where d is the denominator. BV covers all values.

    δ is dy·y, computed as δ = (Σ_j A_ij (dy_i·v_j) + r φ(q)·(dy Sᵀ)) / d in float32, from the same products as dq: y
    itself has been rounded. With SUMS, 1/d goes to `inverse` and δ to `delta`. A program that has only some of the
    features computes only its share of d and of δ d: then one launch with SUMS writes all shares, their sums give 1/d
    and δ, and a second launch with GRADIENT reads these.

    For the gradient of the decay, `crossing` gets Σ_{j<i} M_ij for each query i, with M_ij = A_ij (dy_i·v_j − δ_i) /
    d_i. The sum includes the tokens j of the state; each program writes its share."""
    row, split, begin, stop = dev.span(walk)
    TRANSPOSED: tl.constexpr = K.BF > K.C
    places = tl.arange(0, K.C)
    features, values = dev.channels(dev.part(walk), K.F, K.BF), dev.channels(0, K.DV, K.BV)
    q, k, v, dy, dq = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    key_mask, decay = dev.in_row(scalars, walk.scalars, row, 1)
    inverse, delta, crossing = numbers
    inverse, delta = dev.per_token(inverse, walk, K.SUMS), dev.per_token(delta, walk, K.SUMS)
    crossing = dev.per_token(crossing, walk, True)
    (state,) = dev.states_in(states, walk.states, row, split, K)
    S_i, z_i = dev.load_state(state, features, values, True, K)
    # transposed unless TRANSPOSED, so that neither vᵀ nor φ(k) passes registers on its way to the tensor cores
    S_i, z_i = num.transposed(S_i, not TRANSPOSED), tl.broadcast_to(z_i[:, None], (K.BF, num.COLUMNS))
    for start in tl.range(begin, stop, K.C, num_stages=K.STAGES):
        chunk = dev.chunk(start, stop, K.C)
        present = dev.load_present(key_mask, chunk, K)
        since = tl.full((K.C,), 1, tl.float32)
        scale, delta_i = since, tl.full((K.C,), 0, tl.float32)
        if K.DECAYED:
            since, until, whole = dev.load_decay(decay, chunk)
        k_j = dev.load_keys(k, chunk, features, present, phi, K)
        v_j = dev.load_values(v, chunk, values, present, K)
        dy_i = num.rounded(dev.load(dy, chunk, values), K.PRECISION)
        visible, ones, k_end = dev.later(places + 1, places), num.count(present, K.PRECISION), k_j
        if K.DECAYED:
            visible, weight = dev.between(decay, chunk, KEYS_FIRST=False, K=K)
            k_end = num.rounded(k_j.to(tl.float32) * until[:, None], K.PRECISION)
        from_state = num.product_with_state(dy_i, S_i, K.NORMALIZED or K.DECAYED, TRANSPOSED, K.PRECISION)
        x = num.transposed(num.beside(dev.load(q, chunk, features), num.transposed(from_state, TRANSPOSED)), TRANSPOSED)
        y = num.rounded(dev.map_queries(x, features, present, TRANSPOSED, phi, K), K.PRECISION, ONCE=True)
        q_i = num.transposed(y, TRANSPOSED)
        if K.SUMS:
            from_z = tl.sum(num.product(q_i, num.in_columns(z_i, K.PRECISION), K.PRECISION), 1)
        # products with keys that the query does not see may be infinite
        if K.SUMS or K.DECAYED:
            A = num.product(q_i, tl.trans(k_j), K.PRECISION)
            A = tl.where(visible, A * weight if K.DECAYED else A, 0.0)
            if not K.DECAYED:
                # as in `forward`; for the gradient of a decay, both kernels have to multiply the same numbers
                A = num.rounded(A, K.PRECISION, ONCE=True)
        if K.SUMS:
            d_i = tl.sum(num.wide(A), 1) + from_z * since
        G = num.product(dy_i, tl.trans(v_j), K.PRECISION)
        if K.SUMS:
            A = num.beside(A, G)
            delta_i = tl.sum(A * G, 1) + tl.sum(num.wide(y) * from_state, 0 if TRANSPOSED else 1) * since
            if K.GRADIENT:
                scale = num.one_over(d_i)
                delta_i *= scale
            dev.store_numbers(inverse, chunk, scale if K.GRADIENT else d_i)
            dev.store_numbers(delta, chunk, delta_i)
        if K.GRADIENT:
            if K.NORMALIZED and not K.SUMS:
                scale, delta_i = dev.load_numbers(inverse, chunk), dev.load_numbers(delta, chunk)
            G -= delta_i[:, None]
            if K.NORMALIZED:
                from_state -= dev.along_tokens(delta_i, TRANSPOSED) * dev.along_features(tl.max(z_i, 1), TRANSPOSED)
            if K.DECAYED:
                # rounded as in the sums over queries of `key_gradients`, so that both count the same
                q_end = num.beside(y, from_state) * dev.along_tokens(scale * since, TRANSPOSED)
                q_end = num.wide(num.rounded(q_end, K.PRECISION))
                before = tl.where(dev.later(places, places), A * G, 0.0)
                crossed = tl.sum(before, 1) * scale + tl.sum(q_end * from_state, 0 if TRANSPOSED else 1)
                dev.store_numbers(crossing, chunk, crossed)
                G *= weight
                from_state *= dev.along_tokens(since, TRANSPOSED)
            G = tl.where(visible, G, 0.0)
            dq_i = num.product_or_transpose(num.rounded(G, K.PRECISION), k_j, TRANSPOSED, K.PRECISION) + from_state
            slope = phi.derivative(x, num.beside(y, dq_i))
            if K.MASKED:
                slope = tl.where(dev.along_tokens(present, TRANSPOSED) | (tl.abs(slope) < float("inf")), slope, 0.0)
            dq_i *= dev.along_tokens(scale, TRANSPOSED) * slope
            dev.store(dq, chunk, features, dq_i, TRANSPOSED)
        if K.DECAYED:
            S_i, z_i = S_i * whole[:, None], z_i * whole[:, None]
        S_i += num.product_or_transpose(tl.trans(v_j), k_end, TRANSPOSED, K.PRECISION)
        z_i += num.product(tl.trans(k_end), ones, K.PRECISION)


@dev.jit
def key_gradients(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """Run from the last chunk to the first, with D, r, w and a as in `fast/linear.py`, δ as in `query_gradient`, and dS
    and dz, the gradients of the state after the chunk:

        dk = (v dyᵀ − δ) ∘ Dᵀ φ(q) + w (v dSᵀ + dz)    dv = (φ(k) φ(q)ᵀ ∘ Dᵀ) dy + w φ(k) dS
        dS ← a dS + (r φ(q))ᵀ dy                       dz ← a dz − (r φ(q))ᵀ δ

    where dy and δ are divided by the denominators. With KEYS it writes dk, and BV covers all values; with VALUES dv,
    and BF covers all features.

    For the gradient of the decay, `crossing` gets Σ_{i>j} M_ij for each key j, with M_ij as in `query_gradient`. The
    sum includes the queries i after the call, through dS and dz."""
    row, split, begin, stop = dev.span(walk)
    TRANSPOSED: tl.constexpr = (K.BF > K.C) & (K.BV >= K.C)
    places = tl.arange(0, K.C)
    features = dev.channels(0 if K.VALUES else dev.part(walk), K.F, K.BF)
    values = dev.channels(0 if K.KEYS else dev.part(walk), K.DV, K.BV)
    q, k, v, dy, dk, dv = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    key_mask, decay = dev.in_row(scalars, walk.scalars, row, 1)
    inverse, delta, crossing = numbers
    inverse, delta = dev.per_token(inverse, walk, False), dev.per_token(delta, walk, False)
    crossing = dev.per_token(crossing, walk, True)
    # of rows that share a state, the first one gets its gradient; the others begin with none
    dstate, dstart = dev.states_in(states, walk.states, row, split, K)
    dS_j, dz_j = dev.load_state(dstate, features, values, dev.owns(walk.states[0], row), K)
    # each row stands for one number, the sum of its columns
    dz_j = tl.where(tl.arange(0, num.COLUMNS)[None, :] == 0, dz_j[:, None], 0.0)
    dS_j = num.transposed(dS_j, not TRANSPOSED)
    minus = num.rounded(tl.full((K.C, num.COLUMNS), -1, tl.float32), K.PRECISION)
    chunks = tl.cdiv(stop - begin, K.C)
    for i in tl.range(0, chunks, num_stages=K.STAGES):
        chunk = dev.chunk(begin + (chunks - 1 - i) * K.C, stop, K.C)
        present = dev.load_present(key_mask, chunk, K)
        if K.DECAYED:
            since, until, whole = dev.load_decay(decay, chunk)
        mine = dev.along_tokens(present, TRANSPOSED)
        if K.KEYS:
            v_j = dev.load_values(v, chunk, values, present, K)
            from_state = num.product_with_state(v_j, dS_j, K.NORMALIZED or K.DECAYED, TRANSPOSED, K.PRECISION)
            x = num.beside(dev.load(k, chunk, features), num.transposed(from_state, TRANSPOSED))
            x = num.transposed(x, TRANSPOSED)
        else:
            x = num.transposed(dev.load(k, chunk, features).to(tl.float32), TRANSPOSED)
        y = dev.along_features(features[1], TRANSPOSED)
        y = num.rounded(dev.mapped(x, mine & y if K.MASKED else y, phi), K.PRECISION, ONCE=True)
        y_end = y
        # row j, column i; products with queries that do not see the key may be infinite
        visible = ~dev.later(places, places)
        if K.DECAYED:
            y_end = num.rounded(num.wide(y) * dev.along_tokens(until, TRANSPOSED), K.PRECISION)
        if K.VALUES:
            # before the queries are there, as all of them together would exceed shared memory
            dS = num.rounded(num.transposed(dS_j, not TRANSPOSED), K.PRECISION)
            dv_j = num.product_or_transpose(num.transposed(y_end, TRANSPOSED), dS, TRANSPOSED, K.PRECISION)
        q_i = dev.load_queries(q, chunk, features, present, phi, K)
        dy_i = num.rounded(dev.load(dy, chunk, values), K.PRECISION)
        scale = tl.full((K.C,), 1, tl.float32)
        if K.NORMALIZED:
            scale = dev.load_numbers(inverse, chunk)
            delta_i = tl.broadcast_to(dev.load_numbers(delta, chunk)[:, None], (K.C, num.COLUMNS))
            delta_i = num.in_columns(delta_i, K.PRECISION)
        if K.DECAYED:
            q_i = num.rounded(q_i, K.PRECISION, ONCE=True)
            visible, weight = dev.between(decay, chunk, KEYS_FIRST=True, K=K)
            weight *= scale[None, :]
            q_end = num.rounded(num.wide(q_i) * (scale * since)[:, None], K.PRECISION)
        else:
            q_i = num.rounded(q_i * scale[:, None], K.PRECISION, ONCE=True)
            q_end = q_i
        if K.VALUES or K.DECAYED:
            # not before the product with dS, as shared memory has no room for both
            k_j = num.transposed(y, TRANSPOSED)
            A = num.product(k_j, tl.trans(q_i), K.PRECISION)
        if K.VALUES:
            weighted = num.rounded(tl.where(visible, A * weight if K.DECAYED else A, 0.0), K.PRECISION)
            dv_j += num.product_or_transpose(weighted, dy_i, TRANSPOSED, K.PRECISION)
            dev.store(dv, chunk, values, tl.where(mine, dv_j, 0.0) if K.MASKED else dv_j, TRANSPOSED)
        if K.KEYS:
            G = num.product(v_j, tl.trans(dy_i), K.PRECISION)
            if K.NORMALIZED:
                G += num.product(minus, tl.trans(delta_i), K.PRECISION)
            G = tl.where(visible, G * weight if K.DECAYED else G, 0.0)
            from_state += dev.along_features(tl.sum(dz_j, 1), TRANSPOSED)
            if K.DECAYED:
                after = tl.where(~dev.later(places + 1, places), A * G, 0.0)
                crossed = tl.sum(after, 1) + tl.sum(num.wide(y_end) * from_state, 0 if TRANSPOSED else 1)
                dev.store_numbers(crossing, chunk, crossed)
                from_state *= dev.along_tokens(until, TRANSPOSED)
            dk_j = num.product_or_transpose(num.rounded(G, K.PRECISION), q_i, TRANSPOSED, K.PRECISION) + from_state
            dk_j *= phi.derivative(x, num.beside(y, dk_j))
            dev.store(dk, chunk, features, tl.where(mine, dk_j, 0.0) if K.MASKED else dk_j, TRANSPOSED)
        if K.DECAYED:
            dS_j, dz_j = dS_j * whole[:, None], dz_j * whole[:, None]
        dS_j += num.product_or_transpose(tl.trans(dy_i), q_end, TRANSPOSED, K.PRECISION)
        if K.NORMALIZED:
            dz_j -= num.product(tl.trans(q_end), delta_i, K.PRECISION)
    # one for each row, to be summed over rows that share a state
    dS_j, dz_j, first = num.transposed(dS_j, not TRANSPOSED), tl.sum(dz_j, 1), (split == 0) & K.KEYS
    dev.store_state(dstart, features, values, dS_j, dz_j, first, True, K)
