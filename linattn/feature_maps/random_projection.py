"""Random directions for the Performer's features. Choromanski et al., https://arxiv.org/abs/2009.14794, section 2.4"""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.checks import check_instances, check_sizes, check_types, given
from linattn.ops.numerics import accumulator, without_autocast


@final
class RandomProjection(nn.Module):
    """x ↦ Ω x/d^¼, with `num_rows` rows ω of Ω drawn from N(0, I), each of d = `head_dim` numbers; if `orthogonal`, d
    rows at a time are at right angles.

    With `scaling` 0 each row is as long as a Gaussian vector, so it is still distributed as N(0, I). With 1 all have
    length √d: less variance, but a small bias; anything else raises ValueError. Only `reset_parameters` and `redraw_`
    sample the `rows`."""

    rows: Tensor

    @check_types
    def __init__(self, head_dim: int, num_rows: int, *, orthogonal: bool = True, scaling: int = 0):
        super().__init__()
        check_sizes(head_dim=head_dim, num_rows=num_rows)
        if scaling not in (0, 1):
            raise ValueError(f"scaling must be 0 (lengths of Gaussian vectors) or 1 (√d), but is {scaling!r}")
        self.orthogonal = orthogonal
        self.scaling = scaling
        self.register_buffer("rows", torch.empty(num_rows, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.redraw_()

    @torch.no_grad()
    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Resample the rows in place, on the CPU, so that one seed gives the same rows on every device and rank."""
        num_rows, head_dim = self.rows.shape
        self.rows.copy_(draw_rows(num_rows, head_dim, self.orthogonal, self.scaling, generator))

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n r"]:
        """Project in float32 or better, under autocast too, as the result will be exponentiated."""
        if x.shape[-1] != self.rows.shape[-1]:
            raise ValueError(
                f"x must be (..., {self.rows.shape[-1]}), as the projection was made for, but is {tuple(x.shape)}"
            )
        dtype = accumulator(x.dtype)
        with without_autocast(x):
            x, rows = x.to(dtype), (self.rows.to(dtype) * self.rows.shape[-1] ** -0.25).mT
            if x.ndim == 2 or x.shape[-2] == 1:
                return x @ rows
            # on a CPU a single product over all tokens takes twice as long if the number of rows is no multiple of 8
            sequences = x.flatten(0, -3)
            return (sequences @ rows.expand(sequences.shape[0], -1, -1)).unflatten(0, x.shape[:-2])

    def extra_repr(self) -> str:
        num_rows, head_dim = self.rows.shape
        return f"{head_dim}, {num_rows}, orthogonal={self.orthogonal}, scaling={self.scaling}"


def draw_rows(
    num_rows: int, head_dim: int, orthogonal: bool, scaling: int, generator: torch.Generator | None = None
) -> Float[Tensor, "r d"]:
    rows = torch.randn(num_rows, head_dim, dtype=torch.float64, device="cpu", generator=generator)
    length = rows.norm(dim=-1, keepdim=True) if scaling == 0 else math.sqrt(head_dim)
    if orthogonal:
        return orthonormal_rows(num_rows, head_dim, generator) * length
    return rows if scaling == 0 else rows / rows.norm(dim=-1, keepdim=True) * length


def orthonormal_rows(num_rows: int, dim: int, generator: torch.Generator | None = None) -> Float[Tensor, "r d"]:
    """Return the rows of random rotations of `dim` dimensions from the Haar measure, of the last one as many as fit."""
    blocks = -(-num_rows // dim)
    gaussian = torch.randn(blocks, dim, dim, dtype=torch.float64, device="cpu", generator=generator)
    q, r = torch.linalg.qr(gaussian)
    # QR leaves the signs to the algorithm; with those of a positive diagonal of R it is unique, and q uniform
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return q.flatten(0, 1)[:num_rows]


def default_num_features(head_dim: int) -> int:
    """Return d ln d, the number of features in theorem 4 of the Performer's paper up to a constant."""
    return max(1, int(head_dim * math.log(head_dim)))


def redraw_features_(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Resample every random feature map in the `module`, in the order of `module.modules()`.

    Call it between training steps. `generator` is on the CPU (None: torch's own); generators of the same seed give the
    same features on every rank."""
    check_instances(nn.Module, module=module)
    check_instances(torch.Generator, **given(generator=generator))
    for part in module.modules():
        if isinstance(part, RandomProjection):
            part.redraw_(generator)
