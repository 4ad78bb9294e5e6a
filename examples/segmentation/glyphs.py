"""Digits of 14 × 14 pixels: MNIST's, from its own files, or drawn with seven segments, for which nothing is needed."""

import gzip
import struct
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

SIZE = 14
# ((row, column) of one end, of the other) of the segments, and which of them make each digit
SEGMENTS = (
    ((0, 0), (0, 1)),
    ((0, 0), (1, 0)),
    ((0, 1), (1, 1)),
    ((1, 0), (1, 1)),
    ((1, 0), (2, 0)),
    ((1, 1), (2, 1)),
    ((2, 0), (2, 1)),
)
DIGITS = ("012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356")


def mnist(path: Path) -> Float[Tensor, "digits 14 14"]:
    """Read an idx file, zipped or not, such as t10k-images-idx3-ubyte.gz; each digit's brightest pixel is one."""
    images = idx(path, (2 * SIZE, 2 * SIZE)).float()
    return _bright(F.avg_pool2d(images.unsqueeze(1), 2).squeeze(1))


def idx(path: Path, item: tuple[int, ...]) -> UInt8[Tensor, "..."]:
    """Return the bytes of a file in MNIST's format, zipped or not, which holds items of this shape."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    header = struct.unpack_from(f">{2 + len(item)}i", raw.ljust(16, b"\0"))
    if (header[0], *header[2:]) != (0x801 + len(item), *item):
        raise ValueError(f"{path} must hold items of {item} in MNIST's format, but begins with {raw[:16].hex()}")
    return torch.frombuffer(bytearray(raw[4 * len(header) :]), dtype=torch.uint8).view(header[1], *item)


def drawn(count: int, generator: torch.Generator) -> Float[Tensor, "digits 14 14"]:
    """Digits of seven segments, slanted, of any size and thickness."""
    place = torch.stack(torch.meshgrid(*[torch.arange(SIZE) + 0.5] * 2, indexing="ij"), -1)
    glyphs = []
    for digit in torch.randint(10, (count,), generator=generator).tolist():
        height, width, slant, thickness = torch.rand(4, generator=generator).tolist()
        scale = torch.tensor([3.75 + 0.75 * height, 4 + 3 * width])
        ink = torch.zeros(SIZE, SIZE)
        for segment in map(int, DIGITS[digit]):
            first, last = (torch.tensor(end) * scale + torch.tensor([2.5, 3.0]) for end in SEGMENTS[segment])
            first, last = (end + torch.tensor([0, (1 - 2 * slant) * (end[0] / SIZE - 0.5)]) for end in (first, last))
            along = ((place - first) @ (last - first) / (last - first).square().sum()).clamp(0, 1)
            distance = (place - first - along.unsqueeze(-1) * (last - first)).norm(dim=-1)
            ink = torch.maximum(ink, (1.5 + 0.5 * thickness - distance).clamp(0, 1))
        glyphs.append(ink)
    return _bright(torch.stack(glyphs))


def _bright(glyphs: Tensor) -> Tensor:
    return glyphs / glyphs.amax((1, 2), keepdim=True)
