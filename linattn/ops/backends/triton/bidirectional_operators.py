"""`torch.ops.linattn.key_sums` and `torch.ops.linattn.ask`, the halves of attention to all keys; their gradients."""

from typing import Any

import torch
from torch import Tensor

from linattn.ops.backends.library import define
from linattn.ops.backends.triton import bidirectional_kernels as kernels
from linattn.ops.backends.triton.launch import (
    Arguments,
    Denominators,
    Splits,
    arguments,
    launch,
    with_denominators,
)
from linattn.ops.backends.triton.layout import like, readable, readable_scalars
from linattn.ops.backends.triton.maps import MAPS
from linattn.ops.backends.triton.split_kernels import key_sums as key_sums_kernel
from linattn.ops.backends.triton.split_kernels import query_sums as query_sums_kernel
from linattn.ops.backends.triton.tiling import PRECISION, Tiles, over_both, over_queries, over_values, split


def _lead(*leads: torch.Size) -> torch.Size:
    return torch.broadcast_shapes(*leads)


def _align(x: Tensor, ndim: int) -> Tensor:
    return x[(None,) * (ndim - x.ndim)] if x.ndim < ndim else x


def _constants(x: Tensor, dv: int, taken: Arguments) -> dict[str, Any]:
    return {"PRECISION": PRECISION[x.dtype], "F": x.shape[-1], "DV": dv, "UNIT": taken.unit}


def _cut(n: int, tiles: Tiles, taken: Arguments, device: torch.device) -> tuple[int, int, list[object]]:
    """The splits of each row, and what kernels are told of them."""
    rows = taken.rows
    length, splits = split(n, rows.number * tiles.parts, tiles.C, device)
    return rows.number * splits, splits, [n, length, splits, rows.size1, rows.size2]


def _add_up(parts: Splits, lead: torch.Size, splits: int, dv: int) -> tuple[Tensor, Tensor]:
    """From the splits' sums to those of the rows."""
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


def _key_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> tuple[Tensor, Tensor]:
    call = _Keys(k, v, key_mask)
    if call.m == 0:
        S, z = _key_sums_shapes(k, v, key_mask, feature_map)
        return S.zero_(), z.zero_()
    tiles = over_values(*call.shape)
    taken = arguments(call.lead, [call.k, call.v], call.key_mask, None, None)
    programs, splits, numbers = _cut(call.m, tiles, taken, k.device)
    parts = Splits.room(programs, call.f, call.dv, k)
    launch(
        key_sums_kernel, (programs, tiles.parts),
        [*taken.wide, taken.key_mask, taken.log_decay, *parts.S_and_z, parts.whole, *parts.units, *numbers],
        tiles, PHI=MAPS[feature_map][0], MASKED=key_mask is not None, DECAYED=False, **_constants(k, call.dv, taken),
    )  # fmt: skip
    return _add_up(parts, call.lead, splits, call.dv)


def _key_sums_shapes(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> tuple[Tensor, Tensor]:
    lead = _lead(k.shape[:-2], v.shape[:-2], torch.Size() if key_mask is None else key_mask.shape[:-1])
    S = k.new_empty(*lead, k.shape[-1], v.shape[-1], dtype=torch.float32)
    return S, k.new_empty(*lead, k.shape[-1], dtype=torch.float32)


def _key_sums_gradient(
    dS: Tensor, dz: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str
) -> tuple[Tensor, Tensor]:
    call = _Keys(k, v, key_mask)
    dS, dz = dS.contiguous(), dz.contiguous()
    dk, dv = (
        like(mine, x.shape[-1]) if x.shape[:-2] == call.lead
        else x.new_empty(*call.lead, *x.shape[-2:], dtype=torch.float32)
        for x, mine in ((k, call.k), (v, call.v))
    )  # fmt: skip
    taken = arguments(call.lead, [call.k, call.v, dk, dv], call.key_mask, None, dz)
    phi, derivative = MAPS[feature_map]
    for tiles, keys, values in over_both(*call.shape) if call.m else ():
        programs, _, numbers = _cut(call.m, tiles, taken, k.device)
        launch(
            kernels.key_sums_gradient, (programs, tiles.parts),
            [*taken.wide, taken.key_mask, dS, dz, taken.state, *numbers],
            tiles, PHI=phi, DERIVATIVE=derivative, KEYS=keys, VALUES=values, MASKED=key_mask is not None,
            **_constants(k, call.dv, taken),
        )  # fmt: skip
    return _summed(dk, k), _summed(dv, v)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient if gradient.shape == x.shape else gradient.sum_to_size(*x.shape).to(x.dtype)


def _gradient_shape(x: Tensor, lead: torch.Size) -> Tensor:
    return like(readable(x, lead), x.shape[-1]) if x.shape[:-2] == lead else x.new_empty(x.shape)


def _key_sums_gradient_shapes(
    dS: Tensor, dz: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str
) -> tuple[Tensor, Tensor]:
    lead = dS.shape[:-2]
    return _gradient_shape(k, lead), _gradient_shape(v, lead)


class _Queries:
    """Queries and the sums that they ask, in the rows of both. Queries that serve several rows are expanded."""

    def __init__(self, q: Tensor, S: Tensor, z: Tensor) -> None:
        self.lead = _lead(q.shape[:-2], S.shape[:-2], z.shape[:-1])
        sums = _lead(S.shape[:-2], z.shape[:-1])
        sums = torch.Size((1,) * (len(self.lead) - len(sums))) + sums
        self.q = readable(q.expand(*self.lead, *q.shape[-2:]), self.lead)
        self.S = S.expand(*sums, *S.shape[-2:]).contiguous()
        self.z = z.expand(*sums, z.shape[-1]).contiguous()
        self.n, self.f, self.dv = q.shape[-2], q.shape[-1], S.shape[-1]
        self.shape = (self.f, self.dv, q.dtype, q.device)


def _ask(q: Tensor, S: Tensor, z: Tensor, normalized: bool, feature_map: str) -> Tensor:
    call = _Queries(q, S, z)
    y = like(call.q, call.dv)
    tiles, taken = over_values(*call.shape), arguments(call.lead, [call.q, y], None, None, call.z)
    programs, _, numbers = _cut(call.n, tiles, taken, q.device)
    if call.n:
        launch(
            kernels.ask, (programs, tiles.parts),
            [*taken.wide, call.S, call.z, taken.state, *numbers],
            tiles, PHI=MAPS[feature_map][0], NORMALIZED=normalized, **_constants(q, call.dv, taken),
        )  # fmt: skip
    return y


def _ask_shapes(q: Tensor, S: Tensor, z: Tensor, normalized: bool, feature_map: str) -> Tensor:
    lead = _lead(q.shape[:-2], S.shape[:-2], z.shape[:-1])
    return like(readable(q.expand(*lead, *q.shape[-2:]), lead), S.shape[-1])


def _ask_gradient(
    dy: Tensor, q: Tensor, S: Tensor, z: Tensor, normalized: bool, feature_map: str
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Queries(q, S, z)
    dy, dq = readable(dy, call.lead), like(call.q, call.f)
    if call.n == 0:
        return _summed(dq, q), torch.zeros_like(S), torch.zeros_like(z)
    taken, tiles = arguments(call.lead, [call.q, dy, dq], None, None, call.z), over_queries(*call.shape)
    programs, _, numbers = _cut(call.n, tiles, taken, q.device)
    phi, derivative = MAPS[feature_map]

    def run(denominators: Denominators, *, sums: bool, gradient: bool) -> None:
        launch(
            kernels.ask_gradient, (programs, tiles.parts),
            [*taken.wide, call.S, call.z, taken.state, *denominators, *numbers],
            tiles, PHI=phi, DERIVATIVE=derivative, SUMS=sums, GRADIENT=gradient, NORMALIZED=normalized,
            **_constants(q, call.dv, taken),
        )  # fmt: skip

    denominators = with_denominators(run, call.q, (taken.rows.number, tiles.parts, call.n), normalized)
    tiles = over_values(*call.shape)
    programs, splits, numbers = _cut(call.n, tiles, taken, q.device)
    parts = Splits.room(programs, call.f, call.dv, q)
    of_q, of_dy, _ = taken.wide
    launch(
        query_sums_kernel, (programs, tiles.parts),
        [of_q, of_dy, taken.key_mask, taken.log_decay, *denominators, *parts.S_and_z, parts.whole, *parts.units,
         *numbers],
        tiles, PHI=phi, NORMALIZED=normalized, MASKED=False, DECAYED=False, **_constants(q, call.dv, taken),
    )  # fmt: skip
    if not normalized:
        parts.S_and_z[1].zero_()
    dS, dz = _add_up(parts, call.lead, splits, call.dv)
    return _summed(dq, q), dS.sum_to_size(*S.shape), dz.sum_to_size(*z.shape)


def _ask_gradient_shapes(
    dy: Tensor, q: Tensor, S: Tensor, z: Tensor, normalized: bool, feature_map: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradient_shape(q, dy.shape[:-2]), S.new_empty(S.shape), z.new_empty(z.shape)


key_sums = define(
    "key_sums",
    "(Tensor k, Tensor v, Tensor? key_mask, str feature_map) -> (Tensor, Tensor)",
    _key_sums,
    _key_sums_shapes,
)
key_sums_gradient = define(
    "key_sums_gradient",
    "(Tensor dS, Tensor dz, Tensor k, Tensor v, Tensor? key_mask, str feature_map) -> (Tensor, Tensor)",
    _key_sums_gradient,
    _key_sums_gradient_shapes,
)
ask = define("ask", "(Tensor q, Tensor S, Tensor z, bool normalized, str feature_map) -> Tensor", _ask, _ask_shapes)
ask_gradient = define(
    "ask_gradient",
    "(Tensor dy, Tensor q, Tensor S, Tensor z, bool normalized, str feature_map) -> (Tensor, Tensor, Tensor)",
    _ask_gradient,
    _ask_gradient_shapes,
)


def _keep_keys(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.feature_map = inputs[3]
    ctx.save_for_backward(*inputs[:3])


def _keys_backward(ctx: Any, dS: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    return *key_sums_gradient(dS, dz, *ctx.saved_tensors, ctx.feature_map), None, None


def _keep_queries(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[3:]
    ctx.save_for_backward(*inputs[:3])


def _queries_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *ask_gradient(dy, *ctx.saved_tensors, *ctx.options), None, None


torch.library.register_autograd("linattn::key_sums", _keys_backward, setup_context=_keep_keys)
torch.library.register_autograd("linattn::ask", _queries_backward, setup_context=_keep_queries)
