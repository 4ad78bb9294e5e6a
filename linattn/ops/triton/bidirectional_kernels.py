"""The kernels of attention to all keys, which `split_kernels.py` has summed to a state (arguments: device.py).

    y = φ(q) S / (φ(q)·z)    dq = (dy Sᵀ − δ z) / (φ(q)·z)    dk = v dSᵀ + dz    dv = φ(k) dS

A program has some tokens of one row and some channels, and reads its part of the state once."""

# type checkers do not see that the constant K is a record
# pyright: reportAttributeAccessIssue=false
# nor that `tl.range` is iterated over
# pyright: reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton import arithmetic as num
from linattn.ops.triton import device as dev


@dev.jit
def read(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    row, _, begin, stop = dev.span(walk)
    features, values = dev.channels(0, K.F, K.BF), dev.channels(dev.part(walk), K.DV, K.BV)
    q, y = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    (state,) = dev.states_in(states, walk.states, row, 0, K)
    S, z = dev.load_state(state, features, values, True, K)
    S = num.rounded(S, K.PRECISION)
    for start in tl.range(begin, stop, K.C, num_stages=K.STAGES):
        chunk = dev.chunk(start, stop, K.C)
        q_i = dev.mapped(dev.load(q, chunk, features), dev.both(chunk[1], features[1]), phi)
        q_i = num.rounded(q_i, K.PRECISION, ONCE=True)
        y_i = num.product(q_i, S, K.PRECISION)
        if K.NORMALIZED:
            y_i *= num.one_over(tl.sum(q_i.to(tl.float32) * z[None, :], 1))[:, None]
        dev.store(y, chunk, values, y_i)


@dev.jit
def read_gradient(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """Write dq if GRADIENT. If SUMS, write 1/d and δ = φ(q)·(dy Sᵀ) / d per token, where d is the denominator; without
    GRADIENT, a program's shares of d and of δ d instead. BV covers all values."""
    row, _, begin, stop = dev.span(walk)
    features, values = dev.channels(dev.part(walk), K.F, K.BF), dev.channels(0, K.DV, K.BV)
    q, dy, dq = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    inverse, delta = numbers
    inverse, delta = dev.per_token(inverse, walk, K.SUMS), dev.per_token(delta, walk, K.SUMS)
    (state,) = dev.states_in(states, walk.states, row, 0, K)
    S, z = dev.load_state(state, features, values, True, K)
    mean = tl.full((K.BV,), 0, tl.float32)
    if K.NORMALIZED:
        # dq depends on differences of values only, which S keeps when it is rounded without their mean
        mean = num.mean_value(S, z)
        S -= z[:, None] * mean[None, :]
    S = num.rounded(S, K.PRECISION)
    for start in tl.range(begin, stop, K.C, num_stages=K.STAGES):
        chunk = dev.chunk(start, stop, K.C)
        dy_i, x = dev.load(dy, chunk, values), dev.load(q, chunk, features).to(tl.float32)
        dq_i = num.product(num.rounded(dy_i, K.PRECISION), tl.trans(S), K.PRECISION)
        of_mean = tl.sum(dy_i.to(tl.float32) * mean[None, :], 1)
        if K.SUMS:
            q_i = tl.where((features[0] < K.F)[None, :], num.rounded(phi.function(x), K.PRECISION).to(tl.float32), 0.0)
            scale, delta_i = tl.sum(q_i * z[None, :], 1), tl.sum(q_i * dq_i, 1)
            share = delta_i + scale * of_mean
            if K.GRADIENT:
                scale = num.one_over(scale)
                delta_i *= scale
                share = delta_i + of_mean
            dev.store_numbers(inverse, chunk, scale)
            dev.store_numbers(delta, chunk, share)
        if K.GRADIENT:
            if K.NORMALIZED:
                if not K.SUMS:
                    scale, delta_i = dev.load_numbers(inverse, chunk), dev.load_numbers(delta, chunk) - of_mean
                dq_i = (dq_i - delta_i[:, None] * z[None, :]) * scale[:, None]
            dev.store(dq, chunk, features, dq_i * phi.derivative(x, phi.function(x)))


@dev.jit
def key_sums_gradient(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """Write dk if KEYS, which needs all values in BV, and dv if VALUES, which needs all features in BF."""
    row, _, begin, stop = dev.span(walk)
    features = dev.channels(0 if K.VALUES else dev.part(walk), K.F, K.BF)
    values = dev.channels(0 if K.KEYS else dev.part(walk), K.DV, K.BV)
    k, v, dk, dv = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    key_mask, _ = dev.in_row(scalars, walk.scalars, row, 1)
    (dstate,) = dev.states_in(states, walk.states, row, 0, K)
    dS, dz = dev.load_state(dstate, features, values, True, K)
    for start in tl.range(begin, stop, K.C, num_stages=K.STAGES):
        chunk = dev.chunk(start, stop, K.C)
        present = dev.load_present(key_mask, chunk, K)
        x = dev.load(k, chunk, features).to(tl.float32)
        if K.KEYS:
            v_j = dev.load_values(v, chunk, values, present, K)
            dk_j = num.product_with_state(v_j, tl.trans(dS), True, False, K.PRECISION) + dz[None, :]
            dk_j *= phi.derivative(x, phi.function(x))
            dev.store(dk, chunk, features, tl.where(present[:, None], dk_j, 0.0))
        if K.VALUES:
            k_j = num.rounded(dev.mapped(x, dev.both(present, features[0] < K.F), phi), K.PRECISION, ONCE=True)
            dv_j = num.product(k_j, num.rounded(dS, K.PRECISION), K.PRECISION)
            dev.store(dv, chunk, values, tl.where(present[:, None], dv_j, 0.0))
