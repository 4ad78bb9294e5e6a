"""One token in one launch: the state is read once, and written once into memory of its own. Arguments: device.py."""

# type checkers do not see that the constant K is a record
# pyright: reportAttributeAccessIssue=false

import triton.language as tl

from linattn.ops.triton import arithmetic as num
from linattn.ops.triton import device as dev


@dev.jit
def step(tokens, scalars, states, numbers, walk, phi, K: tl.constexpr):
    """S = a S + φ(k) vᵀ, z = a z + φ(k), y = φ(q) S / φ(q)·z. BF covers all features."""
    row, _, _, _ = dev.span(walk)
    features, values = dev.channels(0, K.F, K.BF), dev.channels(dev.part(walk), K.DV, K.BV)
    q, k, v, y = dev.in_row(tokens, walk.tokens, row, K.UNIT)
    key_mask, log_decay = dev.in_row(scalars, walk.scalars, row, 1)
    state, end = dev.states_in(states, walk.states, row, 0, K)
    S_i, z_i = dev.load_state(state, features, values, True, K)
    q_i = tl.load(q[0] + features[0], mask=features[1], other=0).to(tl.float32)
    k_i = tl.load(k[0] + features[0], mask=features[1], other=0).to(tl.float32)
    v_i = tl.load(v[0] + values[0], mask=values[1], other=0).to(tl.float32)
    q_i, k_i = tl.where(features[1], phi.function(q_i), 0.0), tl.where(features[1], phi.function(k_i), 0.0)
    if K.MASKED:
        present = tl.load(key_mask[0]) != 0
        q_i = tl.where(present | (tl.abs(q_i) < float("inf")), q_i, 0.0)
        k_i, v_i = tl.where(present, k_i, 0.0), tl.where(present, v_i, 0.0)
    if K.DECAYED:
        decay = tl.exp(tl.load(log_decay[0]).to(tl.float32))
        S_i, z_i = S_i * decay, z_i * decay
    S_i += k_i[:, None] * v_i[None, :]
    z_i += k_i
    y_i = tl.sum(q_i[:, None] * S_i, 0)
    if K.NORMALIZED:
        y_i *= num.one_over(tl.sum(q_i * z_i, 0))
    tl.store(y[0] + values[0], num.cast(y_i, y[0].dtype.element_ty), mask=values[1])
    dev.store_state(end, features, values, S_i, z_i, dev.owns(walk.states[1], row), dev.part(walk) == 0, K)
