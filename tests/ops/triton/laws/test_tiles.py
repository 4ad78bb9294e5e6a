"""Values at the tiles that the rule chooses for wide inputs: outputs, states and all gradients, against float64.

A GPU runs this file first. The interpreter gets sequences of a chunk and a few tokens, as each chunk takes it long."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import LinearState, causal_linear_attention, packed_log_decay
from linattn.ops.triton import tiling

CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
KINDS = ("plain", "decay and mask", "packed")
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAMES = ("y", "S", "z", "dq", "dk", "dv", "dS", "dz", "dlog_decay")


def cases(device: str) -> list[tuple[int, int, torch.dtype, str]]:
    """Return all of them for a GPU; the interpreter, which takes seconds for each, gets one of each tile: documents in
    a row are decays, narrow inputs without decays are in splits below, and float16 differs where inputs are wide."""
    widths = (64, 64), (128, 128), (256, 256), (128, 64), (64, 128), (256, 64)
    every = [(*width, dtype, kind) for width in widths for dtype in BOUNDS for kind in KINDS]
    if device == "cuda":
        return every
    others = [(128, 128, torch.float16, "decay and mask"), (128, 128, torch.bfloat16, "plain")]
    others.append((64, 64, torch.bfloat16, "packed"))
    return [*((*width, torch.bfloat16, "decay and mask") for width in widths[:4]), *others]


def length(f: int, dv: int, dtype: torch.dtype, device: torch.device, decayed: bool) -> int:
    """Return a number of tokens that fill no whole chunks: of the interpreter's, more than one where they are few."""
    chunk = tiling.Shape(f, dv, dtype, device, decayed).rule().C
    return 200 if device.type == "cuda" else chunk + 5 if f < 256 else chunk - 5


def results(leaves: list[Tensor], upstream: Tensor, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    q, k, v, S, z, *decay = leaves
    options["log_decay"] = decay[0] if decay else None
    y, state = causal_linear_attention(q, k, v, LinearState(S, z), feature_map="elu_plus_one", **options)
    gradients = torch.autograd.grad(y, leaves, upstream.to(y.dtype))
    return [y, state.S, state.z, *gradients]


def compare(f: int, dv: int, dtype: torch.dtype, device: torch.device, kind: str) -> None:
    n = length(f, dv, dtype, device, kind != "plain")
    q, k, v = (torch.randn(1, n, d).to(device, dtype) for d in (f, f, dv))
    leaves = [q, k, v + 1, torch.rand(1, f, dv, device=device), 1 + torch.rand(1, f, device=device)]
    mask = None
    if kind == "decay and mask":
        leaves.append(-F.softplus(torch.randn(1, n, device=device)))
        mask = (torch.rand(1, n) < 0.8).to(device)
    elif kind == "packed":
        leaves.append(packed_log_decay(torch.tensor([0, 3, 3, n // 2, n], device=device), n).unsqueeze(0))
    upstream = torch.randn_like(v)
    ours = results(leaves, upstream, key_mask=mask, backend="triton")
    exact = results([x.double() for x in leaves], upstream, key_mask=mask, backend="reference")
    for name, a, b in zip(NAMES, ours, exact, strict=False):
        error = (a.double() - b).norm()
        assert error <= BOUNDS[dtype] * b.norm() + 1e-6, f"{name}: {error / b.norm()}"


@pytest.mark.parametrize(("f", "dv", "dtype", "kind"), cases("cuda" if CUDA else "cpu"))
def test_values_at_the_tiles_of_wide_inputs(
    f: int, dv: int, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    compare(f, dv, dtype, device, kind)


@pytest.mark.parametrize(
    ("d", "dtype"), [(64, torch.bfloat16), *([(128, torch.bfloat16), (128, torch.float16)] if CUDA else [])]
)
def test_values_in_splits(d: int, dtype: torch.dtype, device: torch.device, in_splits: Callable[[int], None]) -> None:
    in_splits(1)
    compare(d, d, dtype, device, "plain")
