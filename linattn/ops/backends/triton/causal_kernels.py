"""The causal forward kernel. A program has a row, one of the row's splits of `length` tokens, and some channels; it
walks from chunk to chunk with the state in registers. With D, r, w and a as in `chunked.py`:

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v

`unit` tells where the state before the split is: (s0, s1, s2, s3) are strides over row and split, in states."""

from typing import Any

import triton
import triton.language as tl

from linattn.ops.backends.triton.tiles import (
    between,
    load,
    load_decay,
    load_features,
    load_present,
    load_queries,
    offset,
    one_over,
    owns,
    product,
    rounded,
    store,
)

_TENSORS = {
    *("q", "k", "v", "y", "dy", "dq", "dk", "dv", "key_mask", "log_decay", "inverse", "delta", "crossing"),
    *("S", "z", "S_end", "z_end", "dS", "dz", "dS_start", "dz_start", "parts", "whole_split"),
}


def kernel(function: Any) -> Any:
    """A Triton kernel whose integers the compiler does not look at: a new length or a new batch is no new kernel."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    integers = [name for name in names if name not in _TENSORS and name not in function.__annotations__]
    return triton.jit(do_not_specialize=integers)(function)


@kernel
def forward(
    q, q0, q1, q2, qn, k, k0, k1, k2, kn, v, v0, v1, v2, vn, y, y0, y1, y2, yn,
    key_mask, m0, m1, m2, mn, log_decay, g0, g1, g2, gn,
    S, z, s0, s1, s2, s3, S_unit, z_unit, S_end, z_end, e0, e1, e2,
    n, length, splits, size1, size2,
    PHI: tl.constexpr, NORMALIZED: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write outputs and the state after the last token. BF covers all features."""
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    places, features = tl.arange(0, C), tl.arange(0, BF)
    values = tl.program_id(1) * BV + tl.arange(0, BV)
    begin = split * length
    stop = tl.minimum(begin + length, n)
    q += offset(row, size1, size2, q0, q1, q2) * UNIT
    k += offset(row, size1, size2, k0, k1, k2) * UNIT
    v += offset(row, size1, size2, v0, v1, v2) * UNIT
    y += offset(row, size1, size2, y0, y1, y2) * UNIT
    key_mask += offset(row, size1, size2, m0, m1, m2)
    log_decay += offset(row, size1, size2, g0, g1, g2)
    unit = offset(row, size1, size2, s0, s1, s2) + split * s3
    whole_tile = (features < F)[:, None] & (values < DV)[None, :]
    tile = features[:, None] * DV + values[None, :]
    S_i = tl.load(S + unit * S_unit + tile, mask=whole_tile, other=0)
    z_i = tl.load(z + unit * z_unit + features, mask=features < F, other=0)
    for start in range(begin, stop, C):
        inside = start + places < stop
        present = inside
        if MASKED:
            present = load_present(key_mask, mn, start, inside, C)
        q_i = load_queries(q, qn * UNIT, start, inside, features, present, PHI, MASKED, PRECISION, F, C, BF)
        k_j = load_features(k, kn * UNIT, start, inside, features, PHI, PRECISION, F, C, BF)
        v_j = load(v, vn * UNIT, start, inside, values, DV, C, BV)
        if MASKED:
            # not multiplied by zero: what is masked may be infinite
            k_j, v_j = tl.where(present[:, None], k_j, 0.0), tl.where(present[:, None], v_j, 0.0)
        v_j = rounded(v_j, PRECISION)
        visible = places[:, None] >= places[None, :]
        A = product(q_i, tl.trans(k_j), PRECISION)
        from_state = product(q_i, rounded(S_i, PRECISION), PRECISION)
        from_z = tl.sum(q_i.to(tl.float32) * z_i[None, :], 1)
        k_end = k_j
        if DECAYED:
            since, until, whole, high, low, count = load_decay(log_decay, gn, start, inside, C)
            A *= between(high, low, count)
            from_state, from_z = from_state * since[:, None], from_z * since
            k_end = rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
            S_i, z_i = S_i * whole, z_i * whole
        # rounded first, so that outputs are true means of values
        A = rounded(tl.where(visible, A, 0.0), PRECISION)
        y_i = product(A, v_j, PRECISION) + from_state
        if NORMALIZED:
            y_i *= one_over(tl.sum(A.to(tl.float32), 1) + from_z)[:, None]
        store(y, yn * UNIT, start, inside, values, y_i, DV, C, BV)
        S_i += product(tl.trans(k_end), v_j, PRECISION)
        z_i += tl.sum(k_end.to(tl.float32), 0)
    # rows that share their keys have the same sums: the first one writes them
    last = (split == splits - 1) & owns(row, size1, size2, e0, e1, e2)
    unit = offset(row, size1, size2, e0, e1, e2)
    tl.store(S_end + unit * F * DV + tile, S_i, mask=whole_tile & last)
    tl.store(z_end + unit * F + features, z_i, mask=(features < F) & last & (tl.program_id(1) == 0))
