"""The causal operator with the kernels, and one token at a time with the kernel of its own."""

import torch
from torch import Tensor

from linattn.ops.backends import reference
from linattn.ops.backends.base import Backend, CausalCall
from linattn.ops.backends.differentiable import Tensors, differentiable
from linattn.ops.backends.triton.support import unsupported

# normalized, feature_map, and whether there will be a gradient
Options = tuple[bool, str, bool]


def _forward(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    from linattn.ops.backends.triton import causal_operators

    normalized, feature_map, save = options
    q = inputs[0]
    assert q is not None
    if q.shape[-2] == 1 and not save:
        return causal_operators.step(*inputs, normalized, feature_map)
    return causal_operators.causal(*inputs, normalized, feature_map)


def _backward(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, options: Options) -> Tensors:
    from linattn.ops.backends.triton import causal_operators

    if len(results) == 3:
        # inside vmap a tensor does not tell that a gradient will be asked for
        results = causal_operators.causal(*inputs, *options[:2])
    *gradients, of_decay = causal_operators.causal_gradient(*grads, *results, *inputs, *options[:2])
    return *gradients, None if inputs[5] is None else of_decay, None


def _definition(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    normalized, feature_map, _ = options
    call = CausalCall(*inputs, "output" if normalized else None, feature_map, 1)  # type: ignore[arg-type]
    return reference.run(call)


_operator = differentiable(_forward, _backward, _definition, outputs=3)


def run(call: CausalCall) -> tuple[Tensor, Tensor, Tensor]:
    inputs = call[:7]
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    y, S, z, *_ = _operator((call.normalize == "output", call.feature_map, save), *inputs)
    return y, S, z


BACKEND = Backend("triton", unsupported, run)
