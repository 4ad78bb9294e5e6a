"""Kernels for NVIDIA GPUs, written in Triton, which is imported with the first call that they can run.

φ, mask, decay, denominators and states stay inside: inputs are read, outputs written, and nothing between. Products take
bfloat16 as it is, float16 as TF32 and float32 as it is; sums are float32 in all of them. docs/gpu.md has the figures."""

import importlib.util
import os

import torch
from torch import Tensor

from linattn.ops.backends import reference
from linattn.ops.backends.base import Backend, CausalCall
from linattn.ops.backends.differentiable import Tensors, differentiable
from linattn.ops.backends.triton.layout import shared_in_turns

LARGEST = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INSTALLED = importlib.util.find_spec("triton") is not None
# Triton's own switch, which it reads once too: kernels are then run by Python, on tensors of the CPU
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def unsupported(call: CausalCall) -> str | None:
    reason = cannot(call.q, call.q.shape[-1], call.v.shape[-1])
    if reason is not None:
        return reason
    if call.normalize == "keys":
        return 'has no causal normalize="keys"'
    if call.blindspot > 1:
        return f"has no blindspot, but it is {call.blindspot}"
    return too_many_turns(call.q.shape[:-2], call.S.shape[:-2])


def cannot(x: Tensor, f: int, dv: int) -> str | None:
    """Why no kernel takes these tensors."""
    if x.device.type != "cuda" and not (_INTERPRETED and x.device.type == "cpu"):
        return f"needs CUDA tensors, but q is on {x.device.type}"
    if not _INSTALLED:
        return "needs the package triton, which is not installed"
    if x.dtype not in _DTYPES:
        return f"takes bfloat16, float16 and float32, but q is {x.dtype}"
    if not (1 <= f <= LARGEST and 1 <= dv <= LARGEST):
        return f"takes 1 to {LARGEST} features and values, but there are {f} and {dv}"
    return None if x.device.type == "cpu" else _device_cannot(x)


def _device_cannot(x: Tensor) -> str | None:
    if torch.version.hip is not None:
        return "is written for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(x.device)
    return None if capability >= (8, 0) else f"needs compute capability 8.0, but the device has {capability}"


def too_many_turns(lead: tuple[int, ...], sums: tuple[int, ...]) -> str | None:
    if shared_in_turns(lead, sums) <= 3:
        return None
    return f"takes up to three leading dimensions, but q has {tuple(lead)}, of which the keys share some"


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
