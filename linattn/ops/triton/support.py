"""The reasons why the kernels cannot run a call, from its shapes, dtypes and device."""

import importlib.util
import os
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall, ReadCall, SumCall
from linattn.ops.operator import in_transform
from linattn.ops.triton.layout import shared_groups

LARGEST = 256
# for 10 and 11, Triton 3.7.1 fails to compile some kernels, or compiles nothing without a word
CAPABILITIES = (8, 9, 12)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INSTALLED = importlib.util.find_spec("triton") is not None
# Triton's own switch, which it reads once too: kernels are then run by Python, on tensors of the CPU
DEVICES = ("cuda", "xpu", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda", "xpu")


def unsupported(call: CausalCall) -> str | None:
    reason = cannot(call.q, call.q.shape[-1], call.v.shape[-1])
    if reason is not None:
        return reason
    if call.normalize == "keys":
        return 'has no causal normalize="keys"'
    if 0 in call.q.shape[:-2] and 0 not in call.S.shape[:-2]:
        return f"needs queries for the states that it computes, but q is {tuple(call.q.shape)}"
    # three leading dimensions are always few enough
    return None if call.q.ndim <= 5 else too_many_groups(call.lead, call.S.shape[:-2])


def sums_unsupported(call: SumCall) -> str | None:
    return cannot(call.k, call.k.shape[-1], call.v.shape[-1])


def read_unsupported(call: ReadCall) -> str | None:
    reason = cannot(call.q, *call.S.shape[-2:])
    return too_many_groups(call.lead, call.S.shape[:-2]) if reason is None else reason


def cannot(x: Tensor, f: int, dv: int) -> str | None:
    """Return why no kernel takes tensors like x with f features and dv values, or None."""
    if torch.compiler.is_compiling() and in_transform():
        return "has no tangents inside a compiled graph"
    if not _INSTALLED:
        return "needs the package triton, which is not installed"
    if x.dtype not in _DTYPES:
        return f"takes bfloat16, float16 and float32, but q or k is {x.dtype}"
    if not (1 <= f <= LARGEST and 1 <= dv <= LARGEST):
        return f"takes 1 to {LARGEST} features and as many values, but there are {f} and {dv}"
    return None if x.is_cpu else _device_cannot(x)


def experimental(call: CausalCall | SumCall | ReadCall) -> str | None:
    """Return a reason on AMD's and Intel's GPUs: Triton compiles for them, but nobody has run these kernels there."""
    x = call[0]
    if x.is_xpu or (x.is_cuda and torch.version.hip is not None):
        return "has not been tried on this kind of GPU, and runs there when named"
    return None


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Return a region in which kernels are launched on the GPU that holds x. NotImplementedError: they cannot run
    there, as when a graph that was exported elsewhere comes here without a choice of backends."""
    if reason := _device_cannot(x):
        raise NotImplementedError(f"triton: {reason}")
    return torch.accelerator.device_index(None if x.is_cpu else x.get_device())


def _device_cannot(x: Tensor) -> str | None:
    if not x.is_cuda or torch.version.hip is not None:
        return None
    major, minor = _capability(x.device)
    if major in CAPABILITIES:
        return _assembler_cannot() if major == 9 else None
    supported = ", ".join(map(str, CAPABILITIES))
    return f"is made for the compute capabilities {supported}, but the device has {major}.{minor}"


def _assembler_cannot() -> str | None:
    # imports Triton
    from linattn.ops.triton import assembler

    return assembler.refusal()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def too_many_groups(lead: tuple[int, ...], sums: tuple[int, ...]) -> str | None:
    if shared_groups(lead, sums) <= 3:
        return None
    return f"takes keys shared along neighbouring dimensions, but q has {tuple(lead)} and the keys {tuple(sums)}"
