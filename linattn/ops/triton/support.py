"""The reasons why the kernels cannot run a call, from its shapes, dtypes and device."""

import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall, ReadCall, SumCall
from linattn.ops.operator import in_transform
from linattn.ops.triton.layout import shared_groups

LARGEST = 256
# for 10 and 11, Triton 3.7.1 fails to compile some kernels, or compiles nothing without a word
CAPABILITIES = (8, 9, 12)
# ptxas of CUDA 12.8 compiles some kernels to wrong code for capability 9, and versions up to 13.0 do so elsewhere
# (fla-org/flash-linear-attention 1262)
OLDEST_PTXAS = (13, 1)
PTXAS_PATH = "TRITON_PTXAS_PATH"
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
    # three leading dimensions are always few enough
    return None if call.q.ndim <= 5 else too_many_groups(call.lead, call.S.shape[:-2])


def sums_unsupported(call: SumCall) -> str | None:
    return cannot(call.k, call.k.shape[-1], call.v.shape[-1])


def read_unsupported(call: ReadCall) -> str | None:
    reason = cannot(call.q, *call.S.shape[-2:])
    if reason is not None:
        return reason
    if call.S.dtype != torch.float32 or call.z.dtype != torch.float32:
        return f"takes sums in float32, but they are {call.S.dtype} and {call.z.dtype}"
    sums = torch.broadcast_shapes(call.S.shape[:-2], call.z.shape[:-1])
    lead = torch.broadcast_shapes(call.q.shape[:-2], sums)
    return too_many_groups(lead, (1,) * (len(lead) - len(sums)) + tuple(sums))


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


def _device_cannot(x: Tensor) -> str | None:
    if not x.is_cuda or torch.version.hip is not None:
        return None
    major, minor = _capability(x.device)
    if major in CAPABILITIES:
        return assembler_cannot() if major == 9 else None
    supported = ", ".join(map(str, CAPABILITIES))
    return f"is made for the compute capabilities {supported}, but the device has {major}.{minor}"


@torch.compiler.assume_constant_result
def assembler_cannot() -> str | None:
    """Return why Triton's assembler cannot be trusted with capability 9, or None."""
    return _newer_assembler()


@cache
def _newer_assembler() -> str | None:
    """Triton brings two assemblers and takes the older one: have this process take the newer one, unless
    `TRITON_PTXAS_PATH` names another, or return why that does not help."""
    from triton import knobs

    tool, newer = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    if _version(tool) < OLDEST_PTXAS <= _version(newer) and PTXAS_PATH not in os.environ:
        knobs.nvidia.ptxas = newer.path
        return None
    if _version(tool) >= OLDEST_PTXAS:
        return None
    oldest = ".".join(map(str, OLDEST_PTXAS))
    return (
        f"needs ptxas of CUDA {oldest} or newer on this GPU, as older ones compile it to wrong code, but has "
        f"{tool.version}: torch 2.12 brings a newer one, and {PTXAS_PATH} can name one"
    )


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def too_many_groups(lead: tuple[int, ...], sums: tuple[int, ...]) -> str | None:
    if shared_groups(lead, sums) <= 3:
        return None
    return f"takes keys shared along neighbouring dimensions, but q has {tuple(lead)} and the keys {tuple(sums)}"
