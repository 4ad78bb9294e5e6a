"""The halves of attention to all keys with the kernels, sum the keys and read the sums; and their gradients."""

from typing import Any

import torch
from torch import Tensor

from linattn.ops.backends.base import ReadCall, SumCall, divide
from linattn.ops.backends.operator import Tensors
from linattn.ops.backends.triton import bidirectional_kernels as kernels
from linattn.ops.backends.triton.launch import (
    Arguments,
    Denominators,
    Splits,
    arguments,
    launch,
    with_denominators,
)
from linattn.ops.backends.triton.layout import empty_like_tokens, readable, readable_scalars
from linattn.ops.backends.triton.maps import MAPS
from linattn.ops.backends.triton.split_kernels import key_sums as key_sums_kernel
from linattn.ops.backends.triton.split_kernels import query_sums as query_sums_kernel
from linattn.ops.backends.triton.tiling import PRECISION, Tiles, over_both, over_queries, over_values, split


def _lead(*leads: torch.Size) -> torch.Size:
    return torch.broadcast_shapes(*leads)


def _align(x: Tensor, ndim: int) -> Tensor:
    return x[(None,) * (ndim - x.ndim)] if x.ndim < ndim else x


def _constants(x: Tensor, dv: int, args: Arguments) -> dict[str, Any]:
    return {"PRECISION": PRECISION[x.dtype], "F": x.shape[-1], "DV": dv, "UNIT": args.unit}


def _cut(n: int, tiles: Tiles, args: Arguments, device: torch.device) -> tuple[int, int, list[object]]:
    """The splits of each row, and what kernels are told of them."""
    rows = args.rows
    length, splits = split(n, rows.number * tiles.parts, tiles.C, device)
    return rows.number * splits, splits, [n, length, splits, rows.size1, rows.size2]


def _add_up(parts: Splits, lead: torch.Size, splits: int, dv: int) -> tuple[Tensor, Tensor]:
    """Add the splits' sums up to those of the rows."""
    sums = parts.parts.view(*lead, splits, -1).sum(-2)
    halves = sums.split([parts.features * dv, parts.features], -1)
    S, z = (x.clone(memory_format=torch.contiguous_format) for x in halves)
    return S.view(*lead, parts.features, dv), z


class _Keys:
    """Keys, values and a mask made readable, in rows of their own."""

    def __init__(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        self.lead = _lead(k.shape[:-2], v.shape[:-2], torch.Size() if key_mask is None else key_mask.shape[:-1])
        ndim = len(self.lead) + 2
        self.k, self.v = (readable(_align(x, ndim), self.lead) for x in (k, v))
        key_mask = None if key_mask is None else _align(key_mask, ndim - 1)
        self.key_mask = readable_scalars(key_mask, self.lead)
        self.m, self.f, self.dv = k.shape[-2], k.shape[-1], v.shape[-1]
        self.shape = (self.f, self.dv, k.dtype, k.device)


def sum_keys(given: SumCall, save: bool) -> tuple[Tensor, ...]:
    k, v, key_mask, feature_map = given
    call = _Keys(k, v, key_mask)
    if call.m == 0:
        S, z = empty_sums(given, save)
        return S.zero_(), z.zero_()
    tiles = over_values(*call.shape)
    args = arguments(call.lead, [call.k, call.v], call.key_mask, None, None)
    programs, splits, numbers = _cut(call.m, tiles, args, k.device)
    parts = Splits.empty(programs, call.f, call.dv, k)
    launch(
        key_sums_kernel, (programs, tiles.parts),
        [*args.wide, args.key_mask, args.log_decay, *parts.S_and_z, parts.whole, *parts.units, *numbers],
        tiles, PHI=MAPS[feature_map][0], MASKED=key_mask is not None, DECAYED=False, **_constants(k, call.dv, args),
    )  # fmt: skip
    return _add_up(parts, call.lead, splits, call.dv)


def empty_sums(call: SumCall, save: bool) -> tuple[Tensor, ...]:
    k, v, key_mask, _ = call
    lead = _lead(k.shape[:-2], v.shape[:-2], torch.Size() if key_mask is None else key_mask.shape[:-1])
    S = k.new_empty(*lead, k.shape[-1], v.shape[-1], dtype=torch.float32)
    return S, k.new_empty(*lead, k.shape[-1], dtype=torch.float32)


def sum_keys_gradient(given: SumCall, saved: Tensors, grads: Tensors) -> Tensors:
    (k, v, key_mask, feature_map), (dS, dz) = given, grads
    assert dS is not None and dz is not None
    call = _Keys(k, v, key_mask)
    dS, dz = dS.contiguous(), dz.contiguous()
    dk, dv = (
        empty_like_tokens(mine, x.shape[-1]) if x.shape[:-2] == call.lead
        else x.new_empty(*call.lead, *x.shape[-2:], dtype=torch.float32)
        for x, mine in ((k, call.k), (v, call.v))
    )  # fmt: skip
    args = arguments(call.lead, [call.k, call.v, dk, dv], call.key_mask, None, dz)
    phi, derivative = MAPS[feature_map]
    for tiles, keys, values in over_both(*call.shape) if call.m else ():
        programs, _, numbers = _cut(call.m, tiles, args, k.device)
        launch(
            kernels.key_sums_gradient, (programs, tiles.parts),
            [*args.wide, args.key_mask, dS, dz, args.state, *numbers],
            tiles, PHI=phi, DERIVATIVE=derivative, KEYS=keys, VALUES=values, MASKED=key_mask is not None,
            **_constants(k, call.dv, args),
        )  # fmt: skip
    return _summed(dk, k), _summed(dv, v), None


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient if gradient.shape == x.shape else gradient.sum_to_size(*x.shape).to(x.dtype)


def _gradient_shape(x: Tensor, lead: torch.Size) -> Tensor:
    return empty_like_tokens(readable(x, lead), x.shape[-1]) if x.shape[:-2] == lead else x.new_empty(x.shape)


def empty_sums_gradient(call: SumCall) -> Tensors:
    lead = empty_sums(call, False)[0].shape[:-2]
    return _gradient_shape(call.k, lead), _gradient_shape(call.v, lead), None


class _Queries:
    """Queries and the sums that they read, in the rows of both. Queries that serve several rows are expanded."""

    def __init__(self, q: Tensor, S: Tensor, z: Tensor) -> None:
        self.lead = _lead(q.shape[:-2], S.shape[:-2], z.shape[:-1])
        sums = _lead(S.shape[:-2], z.shape[:-1])
        sums = torch.Size((1,) * (len(self.lead) - len(sums))) + sums
        self.q = readable(q.expand(*self.lead, *q.shape[-2:]), self.lead)
        self.S = S.expand(*sums, *S.shape[-2:]).contiguous()
        self.z = z.expand(*sums, z.shape[-1]).contiguous()
        self.n, self.f, self.dv = q.shape[-2], q.shape[-1], S.shape[-1]
        self.shape = (self.f, self.dv, q.dtype, q.device)


def _means(call: ReadCall) -> Tensor:
    """Return the sums that queries are multiplied with."""
    return divide(call.S, call.z.unsqueeze(-1)) if call.normalize == "keys" else call.S


def read(given: ReadCall, save: bool) -> tuple[Tensor, ...]:
    q, _, z, normalize, feature_map, dtype = given
    call = _Queries(q, _means(given), z)
    y = empty_like_tokens(call.q, call.dv)
    tiles, args = over_values(*call.shape), arguments(call.lead, [call.q, y], None, None, call.z)
    programs, _, numbers = _cut(call.n, tiles, args, q.device)
    if call.n:
        launch(
            kernels.read, (programs, tiles.parts),
            [*args.wide, call.S, call.z, args.state, *numbers],
            tiles, PHI=MAPS[feature_map][0], NORMALIZED=normalize == "output", **_constants(q, call.dv, args),
        )  # fmt: skip
    return (y.to(dtype),)


def empty_outputs(call: ReadCall, save: bool) -> tuple[Tensor, ...]:
    lead = _lead(call.q.shape[:-2], call.S.shape[:-2], call.z.shape[:-1])
    q = readable(call.q.expand(*lead, *call.q.shape[-2:]), lead)
    return (empty_like_tokens(q, call.S.shape[-1]).to(call.dtype),)


def read_gradient(given: ReadCall, saved: Tensors, grads: Tensors) -> Tensors:
    """With "keys", y = φ(q) T and T = S / z, so dS = dT / z and dz = −(dT ∘ T) 1 / z."""
    if given.normalize != "keys":
        return _read_gradient(given, grads)
    T, z = _means(given), given.z.unsqueeze(-1)
    dq, dT, _ = _read_gradient(given._replace(S=T, normalize=None), grads)
    return dq, divide(dT, z), -divide(dT * T, z).sum(-1)


def _read_gradient(given: ReadCall, grads: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    (q, S, z, normalize, feature_map, _), (dy,) = given, grads
    normalized = normalize == "output"
    assert dy is not None
    call = _Queries(q, S, z)
    dy, dq = readable(dy.to(q.dtype), call.lead), empty_like_tokens(call.q, call.f)
    if call.n == 0:
        return _summed(dq, q), torch.zeros_like(S), torch.zeros_like(z)
    args, tiles = arguments(call.lead, [call.q, dy, dq], None, None, call.z), over_queries(*call.shape)
    programs, _, numbers = _cut(call.n, tiles, args, q.device)
    phi, derivative = MAPS[feature_map]

    def run(denominators: Denominators, *, sums: bool, gradient: bool) -> None:
        launch(
            kernels.read_gradient, (programs, tiles.parts),
            [*args.wide, call.S, call.z, args.state, *denominators, *numbers],
            tiles, PHI=phi, DERIVATIVE=derivative, SUMS=sums, GRADIENT=gradient, NORMALIZED=normalized,
            **_constants(q, call.dv, args),
        )  # fmt: skip

    denominators = with_denominators(run, call.q, (args.rows.number, tiles.parts, call.n), normalized)
    tiles = over_values(*call.shape)
    programs, splits, numbers = _cut(call.n, tiles, args, q.device)
    parts = Splits.empty(programs, call.f, call.dv, q)
    of_q, of_dy, _ = args.wide
    launch(
        query_sums_kernel, (programs, tiles.parts),
        [of_q, of_dy, args.key_mask, args.log_decay, *denominators, *parts.S_and_z, parts.whole, *parts.units,
         *numbers],
        tiles, PHI=phi, NORMALIZED=normalized, MASKED=False, DECAYED=False, **_constants(q, call.dv, args),
    )  # fmt: skip
    if not normalized:
        parts.S_and_z[1].zero_()
    dS, dz = _add_up(parts, call.lead, splits, call.dv)
    return _summed(dq, q), dS.sum_to_size(*S.shape), dz.sum_to_size(*z.shape)


def empty_read_gradient(call: ReadCall) -> Tensors:
    lead = _lead(call.q.shape[:-2], call.S.shape[:-2], call.z.shape[:-1])
    return _gradient_shape(call.q, lead), call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape)
