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
    is. Angles and products are float32 or better whatever the dtype of x.
    """
    half = x.shape[-1] // 2
    angles = _angles(positions, half, base)
    if x.dtype != torch.float64:
        angles = angles.float()
    cos, sin = angles.cos(), angles.sin()
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _angles(positions: Int[Tensor, "*b n"], half: int, base: float) -> Float[Tensor, "*b n half"]:
    """In float64 and less than a turn: a float32 product is a tenth of a radian off at the millionth token."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    channel = torch.arange(half, device=positions.device, dtype=exact)
    return (positions.unsqueeze(-1) * base ** (-channel / max(half, 1))).remainder(2 * torch.pi)
