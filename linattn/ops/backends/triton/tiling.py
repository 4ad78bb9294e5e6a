"""Which tiles, warps and splits a call gets, by rule from its shapes and its device: nothing is tried out at run time."""

from typing import NamedTuple

import torch

CHUNK = 64
# numbers of a state in a program's registers: 64 a thread with the usual 4 warps
_STATE = 8192
_SHORTEST_SPLIT = 512

PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "ieee"}


class Tiles(NamedTuple):
    """`parts` programs share the channels of a row."""

    BF: int
    BV: int
    C: int
    parts: int
    num_warps: int
    num_stages: int


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _tiles(BF: int, BV: int, parts: int, dtype: torch.dtype) -> Tiles:
    warps = 4 if BF * BV <= _STATE else 8
    if dtype == torch.float32:
        # products without tensor cores: smaller chunks, or registers overflow
        return Tiles(BF, BV, 32, parts, warps, 1)
    return Tiles(BF, BV, CHUNK, parts, warps, 2 if dtype == torch.bfloat16 else 1)


def over_values(f: int, dv: int, dtype: torch.dtype) -> Tiles:
    """All features and some values in each program."""
    BF, BV = _power(f), _power(dv)
    BV = min(BV, max(16, _STATE // BF))
    return _tiles(BF, BV, -(-dv // BV), dtype)


def over_features(f: int, dv: int, dtype: torch.dtype) -> Tiles:
    """All values and some features in each program."""
    BF, BV = _power(f), _power(dv)
    BF = min(BF, max(16, _STATE // BV))
    return _tiles(BF, BV, -(-f // BF), dtype)


def over_both(f: int, dv: int, dtype: torch.dtype) -> list[tuple[Tiles, bool, bool]]:
    """For the gradients of keys and of values: one program for both where the whole state fits, or one for each."""
    BF, BV = _power(f), _power(dv)
    if BF * BV <= (_STATE if dtype != torch.bfloat16 else 2 * _STATE):
        return [(_tiles(BF, BV, 1, dtype), True, True)]
    return [(over_features(f, dv, dtype), True, False), (over_values(f, dv, dtype), False, True)]


def step_tiles(f: int, dv: int) -> Tiles:
    """For one token: small tiles, as there is nothing to do but to move the state."""
    BF, BV = _power(f), _power(dv)
    BV = min(BV, max(16, _STATE // 2 // BF))
    return Tiles(BF, BV, 1, -(-dv // BV), 4, 1)


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def split(n: int, programs: int, device: torch.device, chunk: int = CHUNK) -> tuple[int, int]:
    """(length, number) of the parts of a sequence: one, unless it would leave half of the device idle; then as many as
    give every processor two programs."""
    wanted = 2 * processors(device) // max(1, programs)
    if wanted < 4:
        return max(n, 1), 1
    length = max(_SHORTEST_SPLIT, -(-n // wanted))
    length = -(-length // chunk) * chunk
    return length, max(1, -(-n // length))
