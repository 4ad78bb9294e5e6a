"""Attention to all keys with the kernels: sum the keys up, then ask the sums."""

import torch
from torch import Tensor

from linattn.ops.backends.base import Sums, divide
from linattn.ops.backends.differentiable import Tensors, differentiable
from linattn.ops.backends.triton.support import cannot, too_many_turns
from linattn.ops.elementwise import ELEMENTWISE


def keys_unsupported(k: Tensor, v: Tensor) -> str | None:
    return cannot(k, k.shape[-1], v.shape[-1])


def ask_unsupported(q: Tensor, S: Tensor, z: Tensor) -> str | None:
    reason = cannot(q, *S.shape[-2:])
    if reason is not None:
        return reason
    if S.dtype != torch.float32 or z.dtype != torch.float32:
        return f"takes sums in float32, but they are {S.dtype} and {z.dtype}"
    sums = torch.broadcast_shapes(S.shape[:-2], z.shape[:-1])
    lead = torch.broadcast_shapes(q.shape[:-2], sums)
    return too_many_turns(lead, (1,) * (len(lead) - len(sums)) + tuple(sums))


def _forward_keys(inputs: Tensors, feature_map: str) -> tuple[Tensor, ...]:
    from linattn.ops.backends.triton import bidirectional_operators

    return bidirectional_operators.key_sums(*inputs, feature_map)


def _backward_keys(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, feature_map: str) -> Tensors:
    from linattn.ops.backends.triton import bidirectional_operators

    return *bidirectional_operators.key_sums_gradient(*grads, *inputs, feature_map), None


def _define_keys(inputs: Tensors, feature_map: str) -> tuple[Tensor, ...]:
    k, v, key_mask = inputs
    assert k is not None and v is not None
    k, v, function = k.float(), v.float(), ELEMENTWISE[feature_map].function
    if key_mask is None:
        features = function(k)
    else:
        # before φ too, whose derivative may not be finite where nothing is asked of it
        present = key_mask.unsqueeze(-1)
        features, v = torch.where(present, function(torch.where(present, k, 0)), 0), torch.where(present, v, 0)
    S = features.mT @ v
    return S, features.sum(-2).expand(*S.shape[:-1])


# normalized, feature_map
Options = tuple[bool, str]


def _forward_ask(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    from linattn.ops.backends.triton import bidirectional_operators

    return (bidirectional_operators.ask(*inputs, *options),)


def _backward_ask(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, options: Options) -> Tensors:
    from linattn.ops.backends.triton import bidirectional_operators

    return bidirectional_operators.ask_gradient(*grads, *inputs, *options)


def _define_ask(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    (q, S, z), (normalized, feature_map) = inputs, options
    assert q is not None and S is not None and z is not None
    features = ELEMENTWISE[feature_map].function(q.float())
    y = features @ S
    return ((divide(y, features @ z.unsqueeze(-1)) if normalized else y).to(q.dtype),)


_keys_operator = differentiable(_forward_keys, _backward_keys, _define_keys, outputs=2)
_ask_operator = differentiable(_forward_ask, _backward_ask, _define_ask, outputs=1)


def sum_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> tuple[Tensor, Tensor]:
    S, z = _keys_operator(feature_map, k, v, key_mask)
    return S, z


def ask(q: Tensor, S: Tensor, z: Tensor, normalize: str | None, feature_map: str, dtype: torch.dtype) -> Tensor:
    if normalize == "keys":
        S = divide(S, z.unsqueeze(-1))
    return _ask_operator((normalize == "output", feature_map), q, S, z)[0].to(dtype)


SUMS = Sums("triton", keys_unsupported, ask_unsupported, sum_keys, ask)
