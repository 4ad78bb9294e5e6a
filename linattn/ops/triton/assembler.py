"""The assembler of capability 9. Triton brings two, and takes the older one for GPUs before capability 10: that of CUDA
12.8 compiles some of our kernels to wrong code, and 13.0 does so to others' (fla-org/flash-linear-attention 1262)."""

import os
from functools import cache

import torch
from triton import knobs

OLDEST = (13, 1)
PATH = "TRITON_PTXAS_PATH"


@torch.compiler.assume_constant_result
def refusal() -> str | None:
    """Return why Triton's assembler cannot be trusted with capability 9, or None. The first call has this process take
    the newer one, if that can be, unless PATH names another."""
    return _choice()


@cache
def _choice() -> str | None:
    tool, newer = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    if version(tool) >= OLDEST:
        return None
    if version(newer) >= OLDEST and PATH not in os.environ:
        knobs.nvidia.ptxas = newer.path
        return None
    return (
        f"needs ptxas of CUDA {'.'.join(map(str, OLDEST))} or newer on this GPU, as older ones compile it to wrong "
        f"code, but has {tool.version}: torch 2.12 brings a newer one, and {PATH} can name one"
    )


def version(tool: knobs.NvidiaTool) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
