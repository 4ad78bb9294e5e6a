import pytest
import torch
from torch.testing import assert_close

from linattn.nn import TokenShift

OFFSETS = [(1, 0), (0, 1), (1, 0, -1), (-1, 0, 1), (2, 0, -3)]
every_offset = pytest.mark.parametrize("offsets", OFFSETS, ids=str)
every_causal_offset = pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (3, 1, 0)], ids=str)


def some_inputs(n: int = 20, b: int = 3, dim: int = 11) -> torch.Tensor:
    return torch.randn(b, n, dim, dtype=torch.float64)


def definition(x: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor:
    y, width = x.clone(), x.shape[-1] // len(offsets)
    for segment, offset in enumerate(offsets):
        for i in range(x.shape[1]):
            j, channels = i - offset, slice(segment * width, (segment + 1) * width)
            y[:, i, channels] = x[:, j, channels] if 0 <= j < x.shape[1] else 0
    return y


@every_offset
@pytest.mark.parametrize("n", [0, 1, 2, 20])
def test_agrees_with_the_definition(offsets, n):
    x = some_inputs(n)
    assert torch.equal(TokenShift(offsets)(x), definition(x, offsets))


@every_offset
@pytest.mark.parametrize("where", ["left", "right", "holes", "none"])
def test_a_masked_token_is_a_missing_token(offsets, where):
    x, places, counts = some_inputs(), torch.arange(20), torch.tensor([[3], [20], [11]])
    mask = {
        "left": places >= 20 - counts,
        "right": places < counts,
        "holes": torch.rand(3, 20) < 0.6,
        "none": torch.zeros(3, 20, dtype=torch.bool),
    }[where]
    y = TokenShift(offsets)(x.masked_fill(~mask.unsqueeze(-1), torch.nan), key_mask=mask)
    for row in range(3):
        assert torch.equal(y[row, mask[row]], definition(x[row, mask[row]].unsqueeze(0), offsets)[0])


@every_causal_offset
def test_pieces_make_the_whole(offsets):
    module, x, mask = TokenShift(offsets), some_inputs(), torch.rand(3, 20) < 0.6
    for whole, masks in ((module(x), [None] * 5), (module(x, key_mask=mask), mask.split((3, 0, 1, 1, 15), 1))):
        state, pieces = None, []
        for piece, piece_mask in zip(x.split((3, 0, 1, 1, 15), 1), masks, strict=True):
            y, state = module.extend(piece, state, key_mask=piece_mask)
            pieces.append(y)
        assert_close(torch.cat(pieces, 1), whole)


def test_the_state_is_small():
    _, state = TokenShift((3, 0)).extend(some_inputs(n=20))
    assert state.shape == (3, 3, 11)
    assert state.untyped_storage().nbytes() == state.numel() * 8


def test_what_looks_ahead_cannot_be_extended():
    with pytest.raises(NotImplementedError, match=r"offsets \(1, 0, -1\) look ahead"):
        TokenShift((1, 0, -1)).extend(some_inputs())


def test_there_must_be_an_offset():
    with pytest.raises(ValueError, match="at least one offset"):
        TokenShift(())
