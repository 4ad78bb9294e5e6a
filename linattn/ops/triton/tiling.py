"""Tiles, warps and splits of a call, by rule from its shapes and its device: nothing is tried out at run time.

The numbers are from what the compiler says of registers and shared memory (docs/gpu.md), not yet from times."""

from functools import lru_cache
from typing import NamedTuple

import torch

# a split shorter than this costs more launches than it saves time
SHORTEST_SPLIT = 512
# in `split`, per token and in tokens
SPLITTING, ENTERING = 1.5, 8

# what tensor cores multiply: float16 as TF32, as weights and sums leave its range; float32 as three products of TF32
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}


class Tiles(NamedTuple):
    """A program's tiles: BF features, BV values and C tokens; `parts` programs share the channels of a row."""

    BF: int
    BV: int
    C: int
    parts: int
    num_warps: int
    num_stages: int


class Split(NamedTuple):
    """The length, in tokens, and the number of the parts into which a row is cut."""

    length: int
    number: int


class Rule(NamedTuple):
    """The sizes for one combination of widths, dtype and GPU: C tokens per chunk; a program keeps at most `state`
    numbers of a state in registers and has `num_warps` warps and `num_stages` stages of loads, or `gradient_warps`
    warps in the kernels of gradients if no other program has a part of its state."""

    C: int
    state: int
    num_warps: int
    num_stages: int
    gradient_warps: int = 8

    def tiles(self, BF: int, BV: int, parts: int) -> Tiles:
        return Tiles(BF, BV, self.C, parts, self.num_warps, self.num_stages)


class Shape(NamedTuple):
    """The facts that decide the tiles: f features, dv values, their dtype and device, and whether there is a decay."""

    f: int
    dv: int
    dtype: torch.dtype
    device: torch.device
    decayed: bool = False

    def rule(self) -> Rule:
        """Return the rule. It has three stages where memory allows: with two, loads would wait for earlier products."""
        widest, memory = max(_power(self.f), _power(self.dv)), shared_memory(self.device)
        large, roomy = memory > 200 * 1024, memory > 160 * 1024
        if self.dtype == torch.float32:
            return Rule(32, 4096, 8, 1) if widest <= 64 else Rule(16, 2048, 8, 1)
        if self.dtype == torch.float16:
            if widest > 128:
                return Rule(16, 2048, 8, 1)
            return Rule(64 if roomy else 32, 4096, 8, 3 if large else 1)
        if widest > 128 or not roomy:
            return Rule(32, 4096, 4, 3 if large else 2)
        if not large:
            return Rule(64, 4096, 4, 3) if widest <= 64 else Rule(64, 8192, 8, 2)
        if widest > 64:
            return Rule(64, 16384, 8, 3)
        # the weights of a decay leave no registers for 128 tokens; of 64, two groups of warps would compute all twice
        return Rule(64, 4096, 4, 3, gradient_warps=4) if self.decayed else Rule(128, 4096, 8, 3)

    def over_values(self) -> Tiles:
        """Return tiles for programs that have all features and some values each."""
        rule, BF = self.rule(), _power(self.f)
        BV = min(_power(self.dv), max(16, rule.state // BF))
        return rule.tiles(BF, BV, -(-self.dv // BV))

    def over_features(self) -> Tiles:
        """Return tiles for programs that have all values and some features each."""
        rule, BV = self.rule(), _power(self.dv)
        BF = min(_power(self.f), max(16, rule.state // BV))
        return rule.tiles(BF, BV, -(-self.f // BF))

    def over_queries(self) -> Tiles:
        """Return tiles for the gradient of queries: all values and, if they fit, all features, which saves a launch."""
        return self._over_all(16384) or self.over_features()

    def over_both(self) -> list[tuple[Tiles, bool, bool]]:
        """Return (tiles, for keys, for values) per launch of their gradients: one launch, if the state fits."""
        most = 2 * self.rule().state if shared_memory(self.device) > 200 * 1024 else 4096
        if tiles := self._over_all(most):
            return [(tiles, True, True)]
        return [(self.over_features(), True, False), (self.over_values(), False, True)]

    def _over_all(self, most: int) -> Tiles | None:
        """Return tiles for programs of a gradient that have a whole state, in bfloat16 and of up to `most` numbers."""
        rule, BF, BV = self.rule(), _power(self.f), _power(self.dv)
        if self.dtype != torch.bfloat16 or most < BF * BV:
            return None
        return rule._replace(num_warps=rule.gradient_warps).tiles(BF, BV, 1)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have: 227 KiB on an H100, 163 on an A100, 99 on most other
    NVIDIA GPUs; 64 where torch does not report it."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 * 1024)
    return (64 if device.type == "xpu" else 227) * 1024


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def step_tiles(f: int, dv: int) -> Tiles:
    """Return tiles for one token: small ones, as there is nothing to do but to move the state."""
    BF, BV = _power(f), _power(dv)
    BV = min(BV, max(16, 4096 // BF))
    return Tiles(BF, BV, 1, -(-dv // BV), 4, 1)


def enter_tiles(f: int, dv: int) -> Tiles:
    """Return the tiles of the kernel that computes the states before each split of a sequence: each program takes C
    numbers of S, and one more program takes z."""
    C = 1024
    return Tiles(0, 0, C, -(-f * dv // C) + 1, 4, 3)


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def split(n: int, programs: int, chunk: int, device: torch.device) -> Split:
    """Cut n tokens into equal splits, multiples of `chunk`, so that the last of the processors is done soonest.

    `programs` walk along each split, one per processor at a time: p of them take ⌈programs · splits / p⌉ rounds of n /
    splits tokens. With more than one split, a token takes `SPLITTING` times as long, as the sums of its keys are
    computed first, and each further split takes the time of `ENTERING` tokens for the state that enters it."""
    return _cut(n, programs, chunk, processors(device), SHORTEST_SPLIT)


@lru_cache(maxsize=4096)
def _cut(n: int, programs: int, chunk: int, processors: int, shortest: int) -> Split:
    most = min(max(1, n // shortest), 2 * processors)
    return min(
        (_in_parts(n, parts, chunk) for parts in range(1, most + 1)),
        key=lambda splits: _duration(splits, programs, processors),
    )


def _in_parts(n: int, parts: int, chunk: int) -> Split:
    if parts == 1:
        return Split(max(n, 1), 1)
    length = -(-n // (parts * chunk)) * chunk
    return Split(length, -(-n // length))


def _duration(splits: Split, programs: int, processors: int) -> float:
    rounds = -(-programs * splits.number // processors)
    return rounds * splits.length * (SPLITTING if splits.number > 1 else 1) + ENTERING * (splits.number - 1)
