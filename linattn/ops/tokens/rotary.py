"""Rotary positions: queries and keys are rotated by angles, so that their product depends only on their distance. Su et
al., RoFormer, https://arxiv.org/abs/2104.09864, eq. 34"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linattn.ops.numerics import exact_dtype


def rotate(
    x: Float[Tensor, "*b n d"], positions: Int[Tensor, "*#b n"], /, *, base: float = 10000.0
) -> Float[Tensor, "*b n d"]:
    """Rotate the pairs of channels c and c + ⌊d/2⌋ by the angle position · base^(−c/⌊d/2⌋).

    Pairs are taken from the two halves (as in GPT-NeoX and Llama), not from neighbours. If d is odd the last channel
    stays as it is. Angles and products are float32 or better whatever the dtype of x."""
    return rotate_by(x, *rotations(positions, x.shape[-1], x.dtype, base=base))


def rotations(
    positions: Int[Tensor, "*b n"], channels: int, dtype: torch.dtype, /, *, base: float = 10000.0
) -> tuple[Float[Tensor, "*b n even"], Float[Tensor, "*b n even"]]:
    """Return [cos, cos] and [−sin, sin] of the angles, which queries and keys at the same positions share."""
    half = channels // 2
    angle = angles(positions, half, max(half, 1), base=base)
    angle = angle if dtype == torch.float64 else angle.float()
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def angles(positions: Int[Tensor, "*b n"], channels: int, width: float, /, *, base: float) -> Float[Tensor, "*b n c"]:
    """Return the angles position · base^(−c/width) of `channels` c = 0, 1, …, less than 2π and in float64: a float32
    product is a tenth of a radian off at the millionth token."""
    channel = torch.arange(channels, device=positions.device, dtype=exact_dtype(positions))
    return (positions.unsqueeze(-1) * base ** (-channel / width)).remainder(2 * torch.pi)


def rotate_by(
    x: Float[Tensor, "*b n d"], cos: Float[Tensor, "*#b n even"], sin: Float[Tensor, "*#b n even"], /
) -> Float[Tensor, "*b n d"]:
    """Rotate x, by `cos` and `sin` from `rotations`: its halves l and r become l cos − r sin and r cos + l sin."""
    even = cos.shape[-1]
    pairs, rest = x[..., :even].to(cos.dtype), x[..., even:]
    pairs = torch.addcmul(pairs * cos, pairs.roll(even // 2, -1), sin).to(x.dtype)
    return torch.cat([pairs, rest], -1) if rest.shape[-1] else pairs
