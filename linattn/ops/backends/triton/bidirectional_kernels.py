"""The kernels of attention to all keys, where the state is whole before it is asked; sums are in `split_kernels.py`.

    y = φ(q) S / (φ(q)·z)    dq = (dy Sᵀ − δ z) / (φ(q)·z)    dk = v dSᵀ + dz    dv = φ(k) dS

A program has some tokens of one row and some channels, and reads its part of the state once."""

import triton.language as tl

from linattn.ops.backends.triton import arithmetic as num
from linattn.ops.backends.triton import device as dev


@dev.jit
def read(
    q, y, state, walk, PHI: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, _, begin, stop = dev.span(walk)
    features, values = dev.channels(0, F, BF), dev.channels(dev.part(walk), DV, BV)
    q, y = dev.in_row((q, y), row, UNIT)
    S, z = dev.load_state(state, row, 0, features, values, True, F, DV)
    S = num.rounded(S, PRECISION)
    for start in range(begin, stop, C):
        tokens = dev.chunk(start, stop, C)
        q_i = dev.mapped(dev.load(q, tokens, features), dev.both(tokens[1], features[1]), PHI)
        q_i = num.rounded(q_i, PRECISION, ONCE=True)
        y_i = num.product(q_i, S, PRECISION)
        if NORMALIZED:
            y_i *= num.one_over(tl.sum(q_i.to(tl.float32) * z[None, :], 1))[:, None]
        dev.store(y, tokens, values, y_i)


@dev.jit
def read_gradient(
    q, dy, dq, state, inverse, delta, walk,
    PHI: tl.constexpr, DERIVATIVE: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr, NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dq, and for the gradient of the sums 1/d and δ = φ(q)·(dy Sᵀ) / d. BV covers all values. SUMS and GRADIENT mean
    the same as in the causal `query_gradient`."""
    row, _, begin, stop = dev.span(walk)
    features, values = dev.channels(dev.part(walk), F, BF), dev.channels(0, DV, BV)
    q, dy, dq = dev.in_row((q, dy, dq), row, UNIT)
    inverse, delta = dev.per_token(inverse, walk, SUMS), dev.per_token(delta, walk, SUMS)
    S, z = dev.load_state(state, row, 0, features, values, True, F, DV)
    mean = tl.zeros((BV,), tl.float32)
    if NORMALIZED:
        # as in the causal `query_gradient`
        mean = num.mean_value(S, z)
        S -= z[:, None] * mean[None, :]
    S = num.rounded(S, PRECISION)
    for start in range(begin, stop, C):
        tokens = dev.chunk(start, stop, C)
        dy_i, x = dev.load(dy, tokens, values), dev.load(q, tokens, features).to(tl.float32)
        dq_i = num.product(num.rounded(dy_i, PRECISION), tl.trans(S), PRECISION)
        of_mean = tl.sum(dy_i.to(tl.float32) * mean[None, :], 1)
        if SUMS:
            q_i = tl.where((features[0] < F)[None, :], num.rounded(PHI(x), PRECISION).to(tl.float32), 0.0)
            scale, delta_i = tl.sum(q_i * z[None, :], 1), tl.sum(q_i * dq_i, 1)
            share = delta_i + scale * of_mean
            if GRADIENT:
                scale = num.one_over(scale)
                delta_i *= scale
                share = delta_i + of_mean
            dev.store_numbers(inverse, tokens, scale)
            dev.store_numbers(delta, tokens, share)
        if GRADIENT:
            if NORMALIZED:
                if not SUMS:
                    scale, delta_i = dev.load_numbers(inverse, tokens), dev.load_numbers(delta, tokens) - of_mean
                dq_i = (dq_i - delta_i[:, None] * z[None, :]) * scale[:, None]
            dev.store(dq, tokens, features, dq_i * DERIVATIVE(x, PHI(x)))


@dev.jit
def key_sums_gradient(
    k, v, dk, dv, key_mask, dstate, walk,
    PHI: tl.constexpr, DERIVATIVE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """For KEYS, BV covers all values; for VALUES, BF all features."""
    row, _, begin, stop = dev.span(walk)
    features = dev.channels(0 if VALUES else dev.part(walk), F, BF)
    values = dev.channels(0 if KEYS else dev.part(walk), DV, BV)
    k, v, dk, dv = dev.in_row((k, v, dk, dv), row, UNIT)
    (key_mask,) = dev.in_row((key_mask,), row, 1)
    dS, dz = dev.load_state(dstate, row, 0, features, values, True, F, DV)
    for start in range(begin, stop, C):
        tokens = dev.chunk(start, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        x = dev.load(k, tokens, features).to(tl.float32)
        if KEYS:
            v_j = dev.load_values(v, tokens, values, present, MASKED, PRECISION)
            dk_j = num.product_with_state(v_j, tl.trans(dS), True, False, PRECISION) + dz[None, :]
            dk_j *= DERIVATIVE(x, PHI(x))
            dev.store(dk, tokens, features, tl.where(present[:, None], dk_j, 0.0))
        if VALUES:
            k_j = num.rounded(dev.mapped(x, dev.both(present, features[0] < F), PHI), PRECISION, ONCE=True)
            dv_j = num.product(k_j, num.rounded(dS, PRECISION), PRECISION)
            dev.store(dv, tokens, values, tl.where(present[:, None], dv_j, 0.0))
