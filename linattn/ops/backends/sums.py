"""Attention to all keys: sum them up once, then ask the sums. Two operators, so that an encoder's output is summed only
once, however many queries come later; each walks through its tokens in segments and saves nothing but its inputs.

    S = φ(k)ᵀ v    z = Σ φ(k)        y = φ(q) S / (φ(q)·z)"""

import torch
from torch import Tensor

from linattn.ops.backends.base import accumulator, divide, infinite_if_none
from linattn.ops.backends.differentiable import Tensors, differentiable
from linattn.ops.backends.library import define, kept_whole
from linattn.ops.backends.memory import Workspace, empty_like, keep_freed_memory
from linattn.ops.elementwise import ELEMENTWISE

# numbers of one tensor in a segment: a megabyte in float32, so that what is computed of them stays in the cache
BLOCK, SEGMENT = 2**18, 256

# normalize, feature_map, and the output's dtype
Options = tuple[str | None, str, torch.dtype]


def _segments(x: Tensor) -> list[tuple[int, int]]:
    n = x.shape[-2]
    length = max(SEGMENT, BLOCK // max(1, x[..., :1, :].numel()))
    return [(start, min(length, n - start)) for start in range(0, n, length)]


def _features(x: Tensor, start: int, length: int, feature_map: str, room: Workspace) -> Tensor:
    x = room.copy("features", x.narrow(-2, start, length))
    return ELEMENTWISE[feature_map].overwrite(x, room.scratch(x))


def _through_map(gradient: Tensor, features: Tensor, feature_map: str, room: Workspace) -> Tensor:
    derivative = ELEMENTWISE[feature_map].derivative
    return gradient if derivative is None else gradient * derivative(features, room.scratch(features))


def _present(x: Tensor, key_mask: Tensor | None, start: int, length: int) -> Tensor:
    return x if key_mask is None else torch.where(key_mask.narrow(-1, start, length).unsqueeze(-1), x, 0)


def _lead(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[int, ...]:
    return torch.broadcast_shapes(k.shape[:-2], v.shape[:-2], () if key_mask is None else key_mask.shape[:-1])


def _sum_keys(inputs: Tensors, feature_map: str) -> tuple[Tensor, ...]:
    k, v, key_mask = inputs
    assert k is not None and v is not None
    dtype = accumulator(k.dtype)
    lead = _lead(k, v, key_mask)
    S, z = (k.new_zeros(*lead, k.shape[-1], width, dtype=dtype) for width in (v.shape[-1], 1))
    room = Workspace(S)
    for start, length in _segments(k):
        features = _present(_features(k, start, length, feature_map, room), key_mask, start, length)
        S += features.mT @ _present(v.narrow(-2, start, length).to(dtype), key_mask, start, length)
        z += features.sum(-2).unsqueeze(-1)
    return S, z.squeeze(-1)


def _sum_keys_gradient(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, feature_map: str) -> Tensors:
    (k, v, key_mask), (dS, dz) = inputs, grads
    assert k is not None and v is not None and dS is not None and dz is not None
    dk, dv, room = empty_like(k, k.shape), empty_like(v, v.shape), Workspace(dS)
    for start, length in _segments(k):
        features, x = _features(k, start, length, feature_map, room), k.narrow(-2, start, length)
        values = v.narrow(-2, start, length).to(dS.dtype)
        # the sum over what was broadcast comes first, so that a masked infinity cannot enter it
        of_k = _present((values @ dS.mT).add_(dz.unsqueeze(-2)), key_mask, start, length)
        of_v = _present(features @ dS, key_mask, start, length)
        of_k = of_k.sum_to_size(*x.shape)
        dk.narrow(-2, start, length).copy_(_through_map(of_k, features, feature_map, room))
        dv.narrow(-2, start, length).copy_(of_v.sum_to_size(*values.shape))
    return dk, dv, None


def _denominator(features: Tensor, z: Tensor) -> Tensor:
    """φ(q)·z of rows, (…, n, 1): as a product it would take half a matrix product's time."""
    return infinite_if_none((features * z.unsqueeze(-2)).sum(-1, keepdim=True))


def _ask(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    q, S, z = inputs
    normalize, feature_map, dtype = options
    assert q is not None and S is not None and z is not None
    if normalize == "keys":
        S = divide(S, z.unsqueeze(-1))
    lead = torch.broadcast_shapes(q.shape[:-2], S.shape[:-2])
    y, room = empty_like(q.new_empty(0, dtype=dtype), (*lead, q.shape[-2], S.shape[-1])), Workspace(S)
    for start, length in _segments(q):
        features = _features(q, start, length, feature_map, room)
        part = features @ S
        if normalize == "output":
            part.div_(_denominator(features, z))
        y.narrow(-2, start, length).copy_(part)
    return (y,)


def _ask_gradient(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, options: Options) -> Tensors:
    (q, S, z), (y,), (dy,), (normalize, feature_map, _) = inputs, results, grads, options
    assert q is not None and S is not None and z is not None and dy is not None
    T, total = (divide(S, z.unsqueeze(-1)) if normalize == "keys" else S), z.unsqueeze(-1)
    dq, dT, dtotal, room = empty_like(q, q.shape), torch.zeros_like(T), torch.zeros_like(total), Workspace(S)
    for start, length in _segments(q):
        features, x = _features(q, start, length, feature_map, room), q.narrow(-2, start, length)
        dy_part = dy.narrow(-2, start, length).to(T.dtype)
        if normalize == "output":
            # y = N / d: dN = dy / d and dd = −dN·y
            dy_part = dy_part / _denominator(features, z)
            dd = -(dy_part * y.narrow(-2, start, length)).sum(-1, keepdim=True)
            part = (dy_part @ T.mT).add_(dd * total.mT)
            dtotal += (features * dd).sum(-2).unsqueeze(-1).sum_to_size(*total.shape)
        else:
            part = dy_part @ T.mT
        dT += (features.mT @ dy_part).sum_to_size(*T.shape)
        part = part.sum_to_size(*x.shape)
        dq.narrow(-2, start, length).copy_(_through_map(part, features, feature_map, room))
    if normalize == "keys":
        return dq, divide(dT, total), -divide(dT * T, total).sum(-1)
    return dq, dT, dtotal.squeeze(-1)


def _sum_keys_definition(inputs: Tensors, feature_map: str) -> tuple[Tensor, ...]:
    k, v, key_mask = inputs
    assert k is not None and v is not None
    features = _present(ELEMENTWISE[feature_map].function(k.to(accumulator(k.dtype))), key_mask, 0, k.shape[-2])
    S = features.mT @ _present(v.to(features.dtype), key_mask, 0, k.shape[-2])
    return S, features.sum(-2).expand(*S.shape[:-1])


def _ask_definition(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    q, S, z = inputs
    normalize, feature_map, dtype = options
    assert q is not None and S is not None and z is not None
    features = ELEMENTWISE[feature_map].function(q.to(S.dtype))
    if normalize == "keys":
        return ((features @ divide(S, z.unsqueeze(-1))).to(dtype),)
    y = features @ S
    return ((divide(y, features @ z.unsqueeze(-1)) if normalize else y).to(dtype),)


def _sum_keys_shapes(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> tuple[Tensor, ...]:
    lead, dtype = _lead(k, v, key_mask), accumulator(k.dtype)
    z = k.new_empty(*lead, k.shape[-1], 1, dtype=dtype).squeeze(-1)
    return k.new_empty(*lead, k.shape[-1], v.shape[-1], dtype=dtype), z


def _ask_shapes(q: Tensor, S: Tensor, z: Tensor, normalize: str | None, feature_map: str, dtype: torch.dtype) -> Tensor:
    return q.new_empty(*torch.broadcast_shapes(q.shape[:-2], S.shape[:-2]), q.shape[-2], S.shape[-1], dtype=dtype)


_whole_sum_keys = define(
    "chunked_sum_keys",
    "(Tensor k, Tensor v, Tensor? key_mask, str feature_map) -> (Tensor, Tensor)",
    lambda *x: _sum_keys(x[:3], x[3]),
    _sum_keys_shapes,
)
_whole_sum_keys_gradient = define(
    "chunked_sum_keys_gradient",
    "(Tensor dS, Tensor dz, Tensor k, Tensor v, Tensor? key_mask, str feature_map) -> (Tensor, Tensor)",
    lambda *x: _sum_keys_gradient(x[2:5], (), x[:2], x[5])[:2],
    lambda dS, dz, k, v, key_mask, feature_map: (k.new_empty(k.shape), v.new_empty(v.shape)),
)
_whole_ask = define(
    "chunked_ask",
    "(Tensor q, Tensor S, Tensor z, str? normalize, str feature_map, ScalarType dtype) -> Tensor",
    lambda *x: _ask(x[:3], x[3:])[0],
    _ask_shapes,
)
_whole_ask_gradient = define(
    "chunked_ask_gradient",
    "(Tensor dy, Tensor y, Tensor q, Tensor S, Tensor z, str? normalize, str feature_map, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    lambda *x: tuple(g.contiguous() for g in _ask_gradient(x[2:5], x[1:2], x[:1], x[5:]) if g is not None),
    lambda dy, y, q, S, z, *options: tuple(x.new_empty(x.shape) for x in (q, S, z)),
)


def _sum_keys_of(inputs: Tensors, feature_map: str) -> tuple[Tensor, ...]:
    return _whole_sum_keys(*inputs, feature_map) if kept_whole(inputs[0]) else _sum_keys(inputs, feature_map)


def _sum_keys_gradient_of(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, feature_map: str) -> Tensors:
    if kept_whole(inputs[0]):
        return *_whole_sum_keys_gradient(*grads, *inputs, feature_map), None
    return _sum_keys_gradient(inputs, results, grads, feature_map)


def _ask_of(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    return (_whole_ask(*inputs, *options),) if kept_whole(inputs[0]) else _ask(inputs, options)


def _ask_gradient_of(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, options: Options) -> Tensors:
    if kept_whole(inputs[0]):
        return _whole_ask_gradient(*grads, *results, *inputs, *options)
    return _ask_gradient(inputs, results, grads, options)


_sum_keys_operator = differentiable(_sum_keys_of, _sum_keys_gradient_of, _sum_keys_definition, outputs=2)
_ask_operator = differentiable(_ask_of, _ask_gradient_of, _ask_definition, outputs=1)


def sum_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_exporting():
        S, z = _sum_keys_definition((k, v, key_mask), feature_map)
        return S, z
    keep_freed_memory(k)
    S, z = _sum_keys_operator(feature_map, k, v, key_mask)
    return S, z


def ask(q: Tensor, S: Tensor, z: Tensor, normalize: str | None, feature_map: str, dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_exporting():
        return _ask_definition((q, S, z), (normalize, feature_map, dtype))[0]
    keep_freed_memory(q)
    return _ask_operator((normalize, feature_map, dtype), q, S, z)[0]
