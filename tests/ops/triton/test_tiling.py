"""The rules that choose tiles and splits."""

import pytest
import torch

from linattn.ops.triton import tiling

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("f", "dv"), [(1, 1), (16, 64), (64, 64), (65, 128), (128, 128), (256, 20), (256, 256)])
@pytest.mark.parametrize("memory", [99, 163, 227])
def test_tiles_cover_all_channels(
    f: int, dv: int, dtype: torch.dtype, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "shared_memory", lambda device: memory * 1024)
    shape = tiling.Shape(f, dv, dtype, CPU)
    by_values = shape.over_values()
    assert f <= by_values.BF and by_values.BV * by_values.parts >= dv > by_values.BV * (by_values.parts - 1)
    by_features = shape.over_features()
    assert dv <= by_features.BV and by_features.BF * by_features.parts >= f > by_features.BF * (by_features.parts - 1)
    by_queries = shape.over_queries()
    assert dv <= by_queries.BV and by_queries.BF * by_queries.parts >= f
    both = shape.over_both()
    assert [sum(keys for _, keys, _ in both), sum(values for _, _, values in both)] == [1, 1]
    for tiles, keys, values in both:
        assert dv <= tiles.BV or not keys
        assert f <= tiles.BF or not values
        assert tiles.C == by_queries.C, "gradients of decays need the same chunks in both"
    for tiles in (by_values, by_features, by_queries, *(tiles for tiles, _, _ in both)):
        # tensor cores take at least 16 rows and columns; more numbers than these overflow registers
        assert min(tiles.BF, tiles.BV, tiles.C) >= 16 and tiles.BF * tiles.BV <= 16384


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "processors", lambda device: 132)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("n", [1, 63, 512, 513, 65_536, 1_000_003])
@pytest.mark.parametrize("programs", [1, 8, 65, 66, 67, 10_000])
@pytest.mark.parametrize("chunk", [16, 64])
def test_splits_cover_the_sequence(n: int, programs: int, chunk: int) -> None:
    length, number = tiling.split(n, programs, chunk, CPU)
    assert length * number >= n > length * (number - 1)
    assert number == 1 or length % chunk == 0
    if n >= 65_536 and programs < 67:
        assert number * programs > 66


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("n", [8192, 65_536])
def test_another_row_takes_little_more_time(n: int) -> None:
    """In rounds of all processors; a round of whole sequences is what a device has to take at the latest."""

    def duration(rows: int) -> float:
        length, number = tiling.split(n, rows, 64, CPU)
        return -(-rows * number // 132) * length * (1.5 if number > 1 else 1)

    assert all(duration(rows + 1) <= duration(rows) + n / 3 for rows in range(1, 132))
    assert all(duration(rows) <= -(-rows // 132) * n for rows in range(1, 500))
