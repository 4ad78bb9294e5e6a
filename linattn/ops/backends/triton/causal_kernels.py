"""The causal forward kernel. A program has a row, one of the row's splits of `length` tokens, and some channels; it
walks from chunk to chunk with the state in registers. With D, r, w and a as in `chunked.py`:

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v"""

import triton.language as tl

from linattn.ops.backends.triton import arithmetic as num
from linattn.ops.backends.triton import device as dev


@dev.jit
def forward(
    q, k, v, y, key_mask, log_decay, state, end, walk,
    PHI: tl.constexpr, NORMALIZED: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr, PRECISION: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write outputs and the state after the last token. BF covers all features."""
    row, split, begin, stop = dev.span(walk)
    features, values = dev.channels(0, F, BF), dev.channels(dev.part(walk), DV, BV)
    q, k, v, y = dev.in_row((q, k, v, y), row, UNIT)
    key_mask, log_decay = dev.in_row((key_mask, log_decay), row, 1)
    decay = dev.fields_of(log_decay, walk)
    S_i, z_i = dev.load_state(state, row, split, features, values, True, F, DV)
    places = tl.arange(0, C)
    z_i = tl.broadcast_to(z_i[:, None], (BF, num.COLUMNS))
    for start in range(begin, stop, C):
        tokens = dev.chunk(start, stop, C)
        present = dev.load_present(key_mask, tokens, MASKED)
        if DECAYED:
            since, until, whole = dev.load_decay(decay, tokens)
        q_i = num.rounded(dev.load_queries(q, tokens, features, present, PHI, MASKED), PRECISION, ONCE=True)
        k_j, v_j = dev.load_keys(k, v, tokens, features, values, present, PHI, MASKED, PRECISION)
        A = num.product(q_i, tl.trans(k_j), PRECISION)
        from_state = num.product(q_i, num.rounded(S_i, PRECISION), PRECISION)
        from_z = tl.sum(num.product(q_i, num.in_columns(z_i, PRECISION), PRECISION), 1)
        visible, ones, k_end = places[:, None] >= places[None, :], num.count(present, PRECISION), k_j
        if DECAYED:
            visible, weight = dev.between(decay, tokens, PRECISION, KEYS_FIRST=False)
            A *= weight
            from_state, from_z = from_state * since[:, None], from_z * since
            k_end = num.rounded(k_j.to(tl.float32) * until[:, None], PRECISION)
            S_i, z_i = S_i * whole[:, None], z_i * whole[:, None]
        # rounded first, so that outputs are true means of values
        A = num.rounded(tl.where(visible, A, 0.0), PRECISION)
        y_i = num.product(A, v_j, PRECISION) + from_state
        if NORMALIZED:
            y_i *= num.one_over(tl.max(num.product(A, ones, PRECISION), 1) + from_z)[:, None]
        dev.store(y, tokens, values, y_i)
        S_i += num.product(tl.trans(k_end), v_j, PRECISION)
        z_i += num.product(tl.trans(k_end), ones, PRECISION)
    # rows that share their keys have the same sums: the first one writes them
    last = (split == dev.plain(walk.splits) - 1) & dev.owns(end, row)
    dev.store_state(end, row, 0, features, values, S_i, tl.max(z_i, 1), last, dev.part(walk) == 0, F, DV)
