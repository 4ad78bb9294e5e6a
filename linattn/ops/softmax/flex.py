"""Window attention as one kernel of PyTorch's FlexAttention, for GPUs. A table says which blocks of queries see which
blocks of keys; single pairs are masked only in blocks seen in part. Dong et al., https://arxiv.org/abs/2412.05496"""

import importlib.util
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from linattn.ops.softmax.window import Window
from linattn.types import KeyMask, Keys, Outputs, Queries, Values

# of queries and of keys: the default of the kernel, which may split it
BLOCK = 128
_COMPILES = importlib.util.find_spec("triton") is not None


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Return why the kernel cannot, or should not, run on q and v, or None."""
    if q.device.type != "cuda":
        return f"needs CUDA tensors, but they are on {q.device}"
    if not _COMPILES:
        return "needs the package triton, which is not installed"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, but q is {q.dtype}"
    if not 16 <= min(q.shape[-1], v.shape[-1]) <= max(q.shape[-1], v.shape[-1]) <= 256:
        return f"takes 16 to 256 channels, but q is {tuple(q.shape)} and v {tuple(v.shape)}"
    if q.shape[-2] <= BLOCK or q.numel() == 0:
        return f"is for sequences longer than {BLOCK}, but q is {tuple(q.shape)}"
    return None


def flex_window(q: Queries, k: Keys, v: Values, /, *, window: Window, present: KeyMask = None) -> Outputs:
    """Compute `local_attention` of packed tokens. Padding stands right of them, is False in `present`, and each padding
    token is seen by its own query only."""
    from torch.nn.attention.flex_attention import BlockMask

    n, group, heads = q.shape[-2], q.shape[1] // k.shape[1], 1 if present is None else present.shape[1]
    # tensors, so that another window needs no compilation
    i = torch.arange(n, dtype=torch.int32, device=q.device)
    first, last = window.first(i), window.last(i)

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = (j >= first[i]) & (j <= last[i])
        return visible if present is None else visible & (present[b, h // group if heads > 1 else 0, j] | (i == j))

    some, whole = visible_blocks(n, window, q.device)
    if present is not None:
        # missing tokens may be anywhere
        some, whole = some | whole, torch.zeros_like(whole)
    # keys of queries, and for gradients queries of keys: `from_kv_blocks` would find these in ten times as long
    tables = [table for blocks in (some, whole, some.T, whole.T) for table in _listed(blocks)]
    mask = BlockMask((n, n), *tables, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)
    return _kernel(q.device.type)(q, k, v, block_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=group > 1)


def visible_blocks(n: int, window: Window, device: torch.device) -> tuple[Bool[Tensor, "c c"], Bool[Tensor, "c c"]]:
    """Return two tables for n tokens: which blocks of queries (rows) see which blocks of keys in part, and in full."""
    first = torch.arange(0, n, BLOCK, device=device)
    last = (first + BLOCK).clamp(max=n) - 1
    (i0, i1), (j0, j1) = (first[:, None], last[:, None]), (first, last)
    # both ends of a query's window grow with the query
    seen = (j1 >= window.first(i0)) & (j0 <= window.last(i1))
    whole = (j0 >= window.first(i1)) & (j1 <= window.last(i0))
    return seen & ~whole, whole


def _listed(blocks: Bool[Tensor, "c c"]) -> tuple[Tensor, Tensor]:
    """Return how many columns of each row are True (1 1 c), and the columns' indices, True ones first (1 1 c c)."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def _kernel(device: str) -> Any:
    """Return the kernel, compiled for CUDA only: uncompiled, as tests run it on a CPU, it computes every similarity."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device == "cuda" else flex_attention
