"""Matrices (C, C) over the C tokens of a chunk as a tree: on each level the tokens are cut into m blocks of `size` = s
= 1, 2, 4 … tokens. Two neighbouring blocks are joined by a block of the matrix below the diagonal, with the rows of the
second and the columns of the first. C is a power of two; B chunks are one batch, and g rows share a key."""

import torch
from torch import Tensor

# matrix products with fewer rows take longer than substitution
SUBSTITUTED = 8


def as_blocks(x: Tensor, size: int) -> Tensor:
    """View tokens (…, C, e) as blocks (…, m, s, e)."""
    return x.unflatten(-2, (x.shape[-2] // size, size))


def halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second blocks of all pairs of neighbours among blocks (…, m, s, e)."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def diagonal_blocks(A: Tensor, size: int) -> Tensor:
    """View the m blocks on the diagonal of A (…, C, C): (…, m, s, s)."""
    return _blocks(A, size, size, 0)


def off_diagonal(A: Tensor, size: int) -> Tensor:
    """View the blocks of A (…, C, C) that join pairs of neighbouring blocks: (…, m/2, s, s)."""
    return _blocks(A, size, 2 * size, size)


def _blocks(A: Tensor, size: int, step: int, offset: int) -> Tensor:
    """View square blocks of A (…, C, C), one every `step` rows: `offset` rows below the diagonal."""
    *lead, C, _ = A.shape
    *strides, row, column = A.stride()
    shape, strides = (*lead, C // step, size, size), (*strides, step * (row + column), row, column)
    return A.as_strided(shape, strides, A.storage_offset() + offset * row)


def row_blocks(x: Tensor, size: int) -> Tensor:
    """View rows (B g C d) as (B m g s d)."""
    return as_blocks(x, size).movedim(1, 2)


def block_products(rows: Tensor, keys: Tensor) -> Tensor:
    """Return the products of each block's rows (B m g s d) with its keys (B m s d): (B m g s s)."""
    # matrix products of one row and one key take longer than elementwise ones
    if keys.shape[-2] == 1:
        return (rows * keys.unsqueeze(2)).sum(-1, keepdim=True)
    return (rows.flatten(2, 3) @ keys.mT).view(*rows.shape[:-1], keys.shape[-2])


def block_products_gradient(rows: Tensor, keys: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and keys from G, that of their products in `block_products`."""
    if keys.shape[-2] == 1:
        return G * keys.unsqueeze(2), (G * rows).sum(2)
    G = G.flatten(2, 3)
    return (G @ keys).view(rows.shape), G.mT @ rows.flatten(2, 3)


def inverse(A: Tensor, M: Tensor) -> Tensor:
    """Write (1 + A)⁻¹ to M and return it, for strictly lower triangular A (B, C, C). Two inverted blocks M₁, M₂ on the
    diagonal and the block A₂₁ below them give M₂₁ = −M₂ A₂₁ M₁. Powers of A, which would overflow where keys repeat, do
    not occur."""
    size = min(SUBSTITUTED, A.shape[-1])
    M.resize_(A.shape).zero_()
    _substitute(diagonal_blocks(A, size), diagonal_blocks(M, size))
    while size < A.shape[-1]:
        first, second = halves(diagonal_blocks(M, size))
        off_diagonal(M, size).sub_(second @ off_diagonal(A, size) @ first)
        size *= 2
    return M


def _substitute(A: Tensor, M: Tensor) -> None:
    """Write (1 + A)⁻¹ to M for small matrices (B, m, s, s), row after row: M_i = 1_i − Σ_j A_ij M_j."""
    # with the rows and columns in front, each operation is one on long vectors
    A = A.permute(2, 3, 0, 1).contiguous()
    rows = torch.zeros_like(A)
    rows.diagonal(dim1=0, dim2=1).fill_(1)
    for j in range(A.shape[0] - 1):
        rows[j + 1 :, : j + 1].addcmul_(A[j + 1 :, j, None], rows[j, : j + 1], value=-1)
    M.copy_(rows.permute(2, 3, 0, 1))
