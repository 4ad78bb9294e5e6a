"""The laws of attention with a blindspot, over feature maps, decays, sizes and masks."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.attention import Decay, GateNeeds, LinearAttention, LocalAttention
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from linattn.feature_maps import FEATURE_MAPS, ElementwiseFeatureMap
from tests import laws
from tests.attention.cases import CHANNELS, HEADS, KEY_HEADS, heads
from tests.attention.test_linear import definition

# identity features have no positive sum to be normalised by
NORMALIZED = [(name, None) for name in ("identity", "elu", "exp", "favor", "efficient")]
NORMALIZED += [(name, normalize) for name, _ in NORMALIZED[1:] for normalize in ("output", "keys")]
MAPS = [("elu", {}), ("efficient", {"normalize": "output"}), ("exp", {"normalize": None})]
every_map = pytest.mark.parametrize(("name", "options"), MAPS, ids=str)


def blind(name: str, options: dict[str, Any], size: int, decay: Decay | None) -> BlindspotAttention:
    feature_map = FEATURE_MAPS[name](CHANNELS, HEADS, KEY_HEADS)
    return BlindspotAttention(LinearAttention(feature_map, causal=True, decay=decay, **options), size).double()


@pytest.mark.parametrize(("name", "normalize"), NORMALIZED)
@pytest.mark.parametrize("decay", [None, {}, {"learned": True}], ids=str)
def test_agrees_with_the_definition(name: str, normalize: str | None, decay: dict[str, Any] | None) -> None:
    inputs, holes = heads(80), laws.masks(80)["holes"]
    for size, masked in itertools.product((2, 5, 7, 64, 100), (False, True)):
        attention = blind(name, {"normalize": normalize}, size, None if decay is None else Decay(KEY_HEADS, **decay))
        mask = holes if masked else torch.ones_like(holes)
        expected, present = definition(attention.inner, *inputs, mask, size=size), mask.expand(-1, HEADS, -1)
        y = attention(*inputs, key_mask=mask if masked else None)
        assert_close(y[present], expected[present], rtol=1e-6, atol=1e-9)
        assert not y[~present].any()


@every_map
@pytest.mark.parametrize(("size", "decays"), [(3, True), (8, False), (50, True)])
@pytest.mark.parametrize("where", ["left", "right", "holes", "all"])
def test_a_masked_key_is_a_missing_key(name: str, options: dict[str, Any], size: int, decays: bool, where: str) -> None:
    """Also where sequences go on, first masked, then not, and as a state of equal rows becomes one of unequal ones."""
    attention, parts, mask = blind(name, options, size, Decay(2) if decays else None), heads(40), laws.masks(40)[where]
    mask[..., :10] = True
    whole = [attention(*(x[row : row + 1, :, mask[row, 0]] for x in parts)) for row in range(2)]
    state, pieces = None, []
    for start, stop in ((0, 0), (0, 10), (10, 12), (12, 13), (13, 13), (13, 40)):
        q, k, v = (x[..., start:stop, :] for x in parts)
        y, state = attention.extend(q, k, v, state, key_mask=mask[..., start:stop] if start else None)
        pieces.append(y)
    together, masked = torch.cat(pieces, -2), attention(*parts, key_mask=mask)
    more = heads(11)
    new, _ = attention.extend(*more, state)
    for row in range(2):
        kept = mask[row, 0]
        assert_close(together[row : row + 1, :, kept], whole[row])
        assert_close(masked[row : row + 1, :, kept], whole[row])
        longer = [
            torch.cat([x[row : row + 1, :, kept], y[row : row + 1]], -2) for x, y in zip(parts, more, strict=True)
        ]
        assert_close(new[row : row + 1], attention(*longer)[..., -11:, :])


@pytest.mark.parametrize("masked", [False, True])
def test_gradients(masked: bool) -> None:
    attention = blind("efficient", {"normalize": "output"}, 3, Decay(2))
    mask = torch.rand(2, 1, 8) < 0.7 if masked else None
    parts = [x.requires_grad_() for x in heads(8)]

    def outputs(*parts: Tensor) -> Tensor:
        first = [x[..., :5, :] for x in parts]
        y, state = attention.extend(*first, key_mask=None if mask is None else mask[..., :5])
        more, _ = attention.extend(*(x[..., 5:, :] for x in parts), state)
        return torch.cat([y, more], -2)

    assert torch.autograd.gradcheck(outputs, parts, fast_mode=True)


@every_map
@pytest.mark.parametrize("size", [2, 7, 64])
@pytest.mark.parametrize("cuts", [(0, 1, 2, 5, 70), (0, 70, 70, 140), (0, 64, 128, 150), tuple(range(31))], ids=str)
def test_pieces_make_the_whole(name: str, options: dict[str, Any], size: int, cuts: tuple[int, ...]) -> None:
    attention, parts = blind(name, options, size, Decay(KEY_HEADS)), heads(cuts[-1])
    state, ys = None, []
    for start, stop in itertools.pairwise(cuts):
        y, state = attention.extend(*(x[..., start:stop, :] for x in parts), state)
        ys.append(y)
    assert_close(torch.cat(ys, -2), attention(*parts))


@pytest.mark.parametrize("masked", [False, True])
def test_the_state_does_not_grow(masked: bool) -> None:
    attention = blind("elu", {}, 5, None)
    for n in (7, 12, 52):
        _, state = attention.extend(*heads(n), key_mask=torch.rand(2, 1, n) < 0.6 if masked else None)
        assert state.block.k.shape[-2] == (4 if masked else 2) and state.block.k._base is None


@pytest.mark.usefixtures("unchecked")
def test_what_it_cannot_be_is_refused() -> None:
    linear = LinearAttention(ElementwiseFeatureMap("elu_plus_one"), causal=True)
    for inner in (LinearAttention(linear.feature_map), LocalAttention(3, causal=True), "elu"):
        with pytest.raises(ValueError, match="belongs to a causal LinearAttention"):
            BlindspotAttention(inner, 4)  # pyright: ignore[reportArgumentType]
    for size in (-1, 0, 1):
        with pytest.raises(ValueError, match=f"at least 2 to hide any, but is {size}"):
            BlindspotAttention(linear, size)
    gated = LinearAttention(linear.feature_map, causal=True, needs=GateNeeds(decay="head"))
    with pytest.raises(ValueError, match="BlindspotAttention makes no gates, but LinearAttention needs some"):
        BlindspotAttention(gated, 4)
