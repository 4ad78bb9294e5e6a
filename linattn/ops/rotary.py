"""Rotary positions: queries and keys turned by angles, so that their product knows only how far apart they are.
Su et al., RoFormer, https://arxiv.org/abs/2104.09864, eq. 34"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotate(
    x: Float[Tensor, "*b n d"], positions: Int[Tensor, "*#b n"], /, *, base: float = 10000.0
) -> Float[Tensor, "*b n d"]:
    """Turns the channels c and c + ⌊d/2⌋ as a pair, by the angle position · base^(−c/⌊d/2⌋).

    The pairs are the two halves (as in GPT-NeoX and Llama), not neighbours. If d is odd the last channel stays as it
    is. Angles and products are float32 or better whatever the dtype of x."""
    return turn(x, *turns(positions, x.shape[-1], x.dtype, base=base))


def turns(
    positions: Int[Tensor, "*b n"], channels: int, dtype: torch.dtype, /, *, base: float = 10000.0
) -> tuple[Float[Tensor, "*b n half"], Float[Tensor, "*b n half"]]:
    """Cosines and sines of the angles, which queries and keys of the same places share."""
    half = channels // 2
    # in float64 and less than a turn: a float32 product is a tenth of a radian off at the millionth token
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    channel = torch.arange(half, device=positions.device, dtype=exact)
    angles = (positions.unsqueeze(-1) * base ** (-channel / max(half, 1))).remainder(2 * torch.pi)
    if dtype != torch.float64:
        angles = angles.float()
    return angles.cos(), angles.sin()


def turn(
    x: Float[Tensor, "*b n d"], cos: Float[Tensor, "*#b n half"], sin: Float[Tensor, "*#b n half"], /
) -> Float[Tensor, "*b n d"]:
    """`rotate`, by angles that are known."""
    half = cos.shape[-1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
