"""The causal forward kernel (arguments: device.py). A program has one row, one of the row's splits of `length` tokens,
and some channels; it walks from chunk to chunk with the state in registers. With D, r, w and a as in `fast/linear.py`:

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v"""

# type checkers do not see that the constant K is a record
# pyright: reportAttributeAccessIssue=false
# nor that `tl.range` is iterated over
# pyright: reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton import arithmetic as num
from linattn.ops.triton import device as dev


@dev.jit
def forward(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """Write outputs and the state after the last token. BF covers all features."""
    row, split, begin, stop = dev.span(walk)
    features, values = dev.channels(0, K.F, K.BF), dev.channels(dev.part(walk), K.DV, K.BV)
    q, k, v, y = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    key_mask, decay = dev.in_row(scalars, walk.scalars, row, 1)
    state, end = dev.states_in(states, walk.states, row, split, K)
    S_i, z_i = dev.load_state(state, features, values, True, K)
    places = tl.arange(0, K.C)
    z_i = tl.broadcast_to(z_i[:, None], (K.BF, num.COLUMNS))
    for start in tl.range(begin, stop, K.C, num_stages=K.STAGES):
        chunk = dev.chunk(start, stop, K.C)
        present = dev.load_present(key_mask, chunk, K)
        if K.DECAYED:
            since, until, whole = dev.load_decay(decay, chunk)
        q_i = num.rounded(dev.load_queries(q, chunk, features, present, phi, K), K.PRECISION, ONCE=True)
        k_j = dev.load_keys(k, chunk, features, present, phi, K)
        v_j = dev.load_values(v, chunk, values, present, K)
        A = num.product(q_i, tl.trans(k_j), K.PRECISION)
        from_state = num.product(q_i, num.rounded(S_i, K.PRECISION), K.PRECISION)
        from_z = tl.sum(num.product(q_i, num.in_columns(z_i, K.PRECISION), K.PRECISION), 1)
        visible, ones, k_end = dev.later(places + 1, places), num.count(present, K.PRECISION), k_j
        if K.DECAYED:
            visible, weight = dev.between(decay, chunk, KEYS_FIRST=False, K=K)
            A *= weight
            from_state, from_z = from_state * since[:, None], from_z * since
            k_end = num.rounded(k_j.to(tl.float32) * until[:, None], K.PRECISION)
            S_i, z_i = S_i * whole[:, None], z_i * whole[:, None]
        # rounded first, so that outputs are true means of values
        A = num.rounded(tl.where(visible, A, 0.0), K.PRECISION)
        y_i = num.product(A, v_j, K.PRECISION) + from_state
        if K.NORMALIZED:
            y_i *= num.one_over(tl.max(num.product(A, ones, K.PRECISION), 1) + from_z)[:, None]
        dev.store(y, chunk, values, y_i)
        S_i += num.product(tl.trans(k_end), v_j, K.PRECISION)
        z_i += num.product(tl.trans(k_end), ones, K.PRECISION)
    # rows that share their keys have the same sums: the first one writes them
    last = (split == dev.plain(walk.splits) - 1) & dev.owns(walk.states[1], row)
    dev.store_state(end, features, values, S_i, tl.max(z_i, 1), last, dev.part(walk) == 0, K)
