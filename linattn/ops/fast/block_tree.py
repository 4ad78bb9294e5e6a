"""Matrices of a chunk (C, C), built from the blocks of 1, 2, 4 … tokens on its diagonal."""

import torch
from torch import Tensor

# products of matrices smaller than this are slower than substitution
SUBSTITUTED = 8


def halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second of each two neighbouring blocks, of (…, m, s, e)."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def in_blocks(x: Tensor, size: int) -> Tensor:
    """(…, C, e) as (…, C/size, size, e)"""
    return x.unflatten(-2, (x.shape[-2] // size, size))


def corners(A: Tensor, size: int) -> Tensor:
    """View the blocks of (…, C, C) in which a second block's tokens meet the first's: (…, C/2s, s, s)."""
    return _blocks(A, size, 2 * size, size)


def diagonal(A: Tensor, size: int) -> Tensor:
    """View the blocks of (…, C, C) on its diagonal: (…, C/s, s, s)."""
    return _blocks(A, size, size, 0)


def _blocks(A: Tensor, size: int, step: int, down: int) -> Tensor:
    """View the blocks of (…, C, C) that begin `down` rows under its diagonal, every `step` rows."""
    *lead, C, _ = A.shape
    *strides, row, column = A.stride()
    shape, strides = (*lead, C // step, size, size), (*strides, step * (row + column), row, column)
    return A.as_strided(shape, strides, A.storage_offset() + down * row)


def inverse(A: Tensor, M: Tensor) -> Tensor:
    """Return (1 + A)⁻¹ in M, for strictly lower triangular A (B, C, C). Each step is exact, and no power of A, which
    would overflow where keys repeat, is formed."""
    size = min(SUBSTITUTED, A.shape[-1])
    M.resize_(A.shape).zero_()
    _substitute(diagonal(A, size), diagonal(M, size))
    while size < A.shape[-1]:
        first, second = halves(diagonal(M, size))
        corners(M, size).sub_(second @ corners(A, size) @ first)
        size *= 2
    return M


def _substitute(A: Tensor, M: Tensor) -> None:
    """Likewise, row after row of small matrices (B, m, s, s): M_i = 1_i − Σ_j A_ij M_j."""
    # with the rows and columns in front, each operation is one on long vectors
    rows = A.permute(2, 3, 0, 1).contiguous()
    found = torch.zeros_like(rows)
    found.diagonal(dim1=0, dim2=1).fill_(1)
    for j in range(rows.shape[0] - 1):
        found[j + 1 :, : j + 1].addcmul_(rows[j + 1 :, j, None], found[j, : j + 1], value=-1)
    M.copy_(found.permute(2, 3, 0, 1))
