"""One token in one launch: the state is read once, and written once into memory of its own."""

import triton.language as tl

from linattn.ops.backends.triton.causal_kernels import kernel
from linattn.ops.backends.triton.tiles import cast, offset, one_over, owns


@kernel
def step(
    q, q0, q1, q2, k, k0, k1, k2, v, v0, v1, v2, y, key_mask, m0, m1, m2, log_decay, g0, g1, g2,
    S, z, S_end, z_end, e0, e1, e2, size1, size2,
    PHI: tl.constexpr, NORMALIZED: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    F: tl.constexpr, DV: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """S = a S + φ(k) vᵀ, z = a z + φ(k), y = φ(q) S / φ(q)·z. BF covers all features."""
    row = tl.program_id(0)
    features = tl.arange(0, BF)
    values = tl.program_id(1) * BV + tl.arange(0, BV)
    real, wanted = features < F, values < DV
    unit = offset(row, size1, size2, e0, e1, e2)
    tile, whole_tile = features[:, None] * DV + values[None, :], real[:, None] & wanted[None, :]
    S_i = tl.load(S + unit * F * DV + tile, mask=whole_tile, other=0)
    z_i = tl.load(z + unit * F + features, mask=real, other=0)
    q_i = tl.load(q + offset(row, size1, size2, q0, q1, q2) * UNIT + features, mask=real, other=0)
    k_i = tl.load(k + offset(row, size1, size2, k0, k1, k2) * UNIT + features, mask=real, other=0)
    v_i = tl.load(v + offset(row, size1, size2, v0, v1, v2) * UNIT + values, mask=wanted, other=0)
    q_i = tl.where(real, PHI(q_i.to(tl.float32)), 0.0)
    k_i, v_i = tl.where(real, PHI(k_i.to(tl.float32)), 0.0), v_i.to(tl.float32)
    if MASKED:
        present = tl.load(key_mask + offset(row, size1, size2, m0, m1, m2)) != 0
        q_i = tl.where(present | (tl.abs(q_i) < float("inf")), q_i, 0.0)
        k_i, v_i = tl.where(present, k_i, 0.0), tl.where(present, v_i, 0.0)
    if DECAYED:
        kept = tl.exp(tl.load(log_decay + offset(row, size1, size2, g0, g1, g2)).to(tl.float32))
        S_i, z_i = S_i * kept, z_i * kept
    S_i += k_i[:, None] * v_i[None, :]
    z_i += k_i
    y_i = tl.sum(q_i[:, None] * S_i, 0)
    if NORMALIZED:
        y_i *= one_over(tl.sum(q_i * z_i, 0))
    tl.store(y + row.to(tl.int64) * DV + values, cast(y_i, y.dtype.element_ty), mask=wanted)
    mine = owns(row, size1, size2, e0, e1, e2)
    tl.store(S_end + unit * F * DV + tile, S_i, mask=whole_tile & mine)
    tl.store(z_end + unit * F + features, z_i, mask=real & mine & (tl.program_id(1) == 0))
