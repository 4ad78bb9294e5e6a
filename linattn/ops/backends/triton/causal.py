"""The causal operator with the kernels, and one token at a time with the kernel of its own."""

from torch import Tensor

from linattn.ops.backends import reference
from linattn.ops.backends.base import Backend, CausalCall
from linattn.ops.backends.differentiable import Tensors, differentiable
from linattn.ops.backends.triton.support import unsupported

# normalized, feature_map
Options = tuple[bool, str]


def _forward(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    from linattn.ops.backends.triton import causal_operators

    q = inputs[0]
    assert q is not None
    return (causal_operators.step if q.shape[-2] == 1 else causal_operators.causal)(*inputs, *options)


def _backward(inputs: Tensors, results: tuple[Tensor, ...], grads: Tensors, options: Options) -> Tensors:
    from linattn.ops.backends.triton import causal_operators

    *gradients, of_decay = causal_operators.causal_gradient(*grads, *inputs, *options)
    return *gradients, None if inputs[5] is None else of_decay, None


def _definition(inputs: Tensors, options: Options) -> tuple[Tensor, ...]:
    normalized, feature_map = options
    call = CausalCall(*inputs, "output" if normalized else None, feature_map, 1)  # type: ignore[arg-type]
    return reference.run(call)


_operator = differentiable(_forward, _backward, _definition, outputs=3)


def run(call: CausalCall) -> tuple[Tensor, Tensor, Tensor]:
    y, S, z = _operator((call.normalize == "output", call.feature_map), *call[:7])
    return y, S, z


BACKEND = Backend("triton", unsupported, run)
