"""Root-mean-square norms of inputs of any scale, in half precision too. Zeros stay zeros."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.checks import check_numbers, check_sizes, check_types
from linattn.nn.checks import check_floats
from linattn.types import Reduction

HEAD_NORM_EPS = 1e-4


@final
class HeadNorm(nn.Module):
    """y = w ⊙ x / √(mean(x²) + eps) over the `head_dim` channels of a head, which un-normalised attention needs.
    Sun et al., RetNet, https://arxiv.org/abs/2307.08621; Qin et al., TransNormer, https://arxiv.org/abs/2210.10340

    Where q and the state nearly cancel, x is little more than rounding error. With an `eps` of 0, y is then as large as
    any other output, and its gradient too large for float16; see docs/gates.md for what each value gives."""

    over_ranks: Reduction | None = None  # where each rank of `linattn.distributed` has a part of the channels

    @check_types
    def __init__(self, head_dim: int, *, eps: float = HEAD_NORM_EPS):
        super().__init__()
        check_sizes(head_dim=head_dim)
        check_numbers(eps=eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return _rms_normalized(x, len(self.weight), self.weight, self.eps, self.over_ranks)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


@final
class ScaleNorm(nn.Module):
    """y = g · x / ‖x‖ over `dim` channels with one learned g, √dim at first.
    Nguyen and Salazar, https://arxiv.org/abs/1910.05895"""

    @check_types
    def __init__(self, dim: int):
        super().__init__()
        check_sizes(dim=dim)
        self.dim = dim
        self.g = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.g, self.dim**0.5)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return _rms_normalized(x, self.dim, self.g / self.dim**0.5, 0.0)

    def extra_repr(self) -> str:
        return f"{self.dim}"


def _rms_normalized(
    x: Tensor, channels: int, factor: Tensor, eps: float, over_ranks: Reduction | None = None
) -> Tensor:
    """Return x / √(mean(x²) + eps) times the factor, computed in float32 or better."""
    check_floats(x, factor)
    if x.shape[-1:] != (channels,):
        raise ValueError(f"the norm is of {channels} channels, but x is {tuple(x.shape)}")
    dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
    # squares of small and of large numbers leave float32's range; a factor of x and √eps changes neither the result nor
    # its gradient
    largest = x.detach().abs().amax(-1, keepdim=True)
    largest = (largest if over_ranks is None else over_ranks(largest, "max")).clamp(min=eps**0.5)
    largest = largest.masked_fill(largest == 0, 1)
    x = x / largest
    square = x.square().mean(-1, keepdim=True)
    square = square if over_ranks is None else over_ranks(square, "mean")
    if eps:
        square = square + (eps**0.5 / largest).square()
    return (x * square.masked_fill(square == 0, 1).rsqrt() * factor).to(dtype)
