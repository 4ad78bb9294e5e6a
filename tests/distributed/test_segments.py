"""The map of a segment takes the state before its tokens to the one that `extend` returns after them, wherever a
sequence is cut."""

from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.attention import (
    DeltaAttention,
    LocalAttention,
    RotaryAttention,
    SplitHeads,
    named_attention,
)
from linattn.attention.gates import GateNeeds
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from linattn.distributed.segments import position_segment, segment
from linattn.distributed.segments.base import PIECE
from linattn.nn.attention import MultiheadAttention
from linattn.nn.convolution import ShortConvolution
from linattn.nn.token_shift import TokenShift
from linattn.ops.features import FeatureState
from linattn.ops.nested import map_state
from linattn.ops.state import LinearState
from tests.attention.cases import CHANNELS, FADING, gates_of, heads
from tests.distributed.cases import ATTENTIONS, PACKED, TOKENS, case, linear

CLOSE = {"rtol": 1e-14, "atol": 1e-14}
every_layer = pytest.mark.parametrize("name", [*ATTENTIONS, *TOKENS])


def after(segments: list[Any], state: Any) -> Any:
    return reduce(lambda state, each: each.after(state), segments, state)


def leaves(state: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_state(found.append, state)
    return found


def size(x: Tensor) -> Tensor | int:
    return x.detach().abs().amax().clamp(min=1) if x.numel() else 1


def assert_same(ours: Any, theirs: Any) -> None:
    """Two states are the same sums if their scales differ and the factors of the sums make up for it."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, FeatureState) and theirs.log_scale is not None:
        assert_close(ours.log_scale, theirs.log_scale, rtol=1e-9, atol=1e-6)
        factor = (ours.log_scale - theirs.log_scale).nan_to_num(0).exp()
        sums = ours.sums.S * factor.unsqueeze(-1), ours.sums.z * factor
        ours, theirs = LinearState(*sums), theirs.sums
    if isinstance(theirs, tuple):
        for x, y in zip(ours, theirs, strict=True):
            assert_same(x, y)
    elif theirs is not None and theirs.is_floating_point():
        assert_close(ours / size(theirs), theirs / size(theirs), **CLOSE)
    else:
        assert ours is theirs or torch.equal(ours, theirs)


@every_layer
@pytest.mark.parametrize("masked", [False, True])
def test_a_segment_is_what_extend_does_to_the_state(name: str, masked: bool) -> None:
    """From nothing and from a state; of many tokens, one, and fewer than a window holds; and no token at all."""
    whole = case(name, 45, masked=masked)
    past, one = whole.cut(0, 20).extend(None), whole.cut(0, 1).extend(None)
    for start, stop, *states in ((20, 45, None, past, one), (20, 21, past), (20, 22, None, past), (20, 20, past)):
        new = whole.cut(start, stop)
        for state in states:
            # what sends a segment takes it apart and puts it together
            assert_same(map_state(Tensor.clone, new.segment()).after(state), new.extend(state))


@every_layer
@pytest.mark.parametrize("masked", [False, True])
def test_segments_and_gradients_are_those_of_the_whole(name: str, masked: bool) -> None:
    """Three segments, one of them a single token, fold: the last state, and its gradients with respect to inputs,
    gates and the first state."""
    whole = case(name, 30, masked=masked)
    *past, tokens = [whole.cut(0, 9), whole.cut(9, 30)]
    inputs, gates, state = (
        map_state(leaf, x) for x in (tokens.inputs, tokens.options.get("gates"), past[0].extend(None))
    )
    tokens = tokens._replace(inputs=inputs, options=tokens.options | ({} if gates is None else {"gates": gates}))
    given = [x for x in leaves((inputs, gates, state)) if x.requires_grad]
    fold = after([tokens.cut(*ends).segment() for ends in ((0, 12), (12, 13), (13, 21))], state)
    expected = tokens.extend(state)
    assert_same(fold, expected)
    for ours, theirs in zip(
        *(torch.autograd.grad(total(x), given, allow_unused=True) for x in (fold, expected)), strict=True
    ):
        assert (ours is None) == (theirs is None) or not (theirs if ours is None else ours).any()
        if ours is not None and theirs is not None:
            assert_same(ours, theirs)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


def total(state: Any) -> Tensor:
    """A number that depends on every sum, and not on the scale, which has no gradient. A sine of large numbers would
    multiply their rounding by their size."""
    parts = [x / size(x) for x in leaves(state) if x.requires_grad]
    return torch.stack(
        [(x.sin() * torch.linspace(1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in parts]
    ).sum()


@pytest.mark.parametrize("name", [*FADING, "elu, decays per channel", "favor, decays per head", *PACKED])
@pytest.mark.parametrize("masked", [False, True])
def test_sequences_of_a_packed_row_stay_apart(name: str, masked: bool) -> None:
    """Compared with `extend` token by token, which is more precise than at once: features with scales get a scale that
    is the sum of decays, and a large number stands for the −∞ where a sequence begins."""
    whole = case(name, 40, masked=masked, packed=True)
    past = whole.cut(0, 12).extend(None)
    for start, stop in ((12, 40), (12, 13), (12, 15)):
        state = reduce(lambda state, i: whole.cut(i, i + 1).extend(state), range(start, stop), past)
        assert_same(whole.cut(start, stop).segment().after(past), state)
    cuts = [whole.cut(*ends).segment() for ends in ((12, 14), (14, 15), (15, 40))]
    assert_same(after(cuts, past), whole.cut(12, 40).segment().after(past))


@pytest.mark.parametrize("name", ["gla", "ssd", "kda", "delta"])
def test_pieces_of_a_segment_are_one(name: str) -> None:
    """Sums and maps are computed in pieces of some hundred tokens, the last of which may be a single one."""
    whole = case(name, 2 * PIECE + 1, b=1)
    state = whole.cut(0, 7).extend(None)
    assert_same(whole.segment().after(state), whole.extend(state))


@pytest.mark.parametrize("name", ["elu", "ssd", "gla", "gated_delta", "roformer", "favor"])
def test_sums_of_half_precision_inputs_are_float32(name: str) -> None:
    whole = case(name, 300, b=1)
    half = whole._replace(
        layer=whole.layer.float(),
        inputs=tuple(x.bfloat16() for x in whole.inputs),
        options=to(torch.float32, whole.options),
    )
    exact = whole._replace(inputs=to(torch.float64, half.inputs), options=to(torch.float64, half.options))
    ours = [leaves(x) for x in (half.segment().after(None), half.extend(None))]
    theirs = leaves(exact._replace(layer=case(name, 300, b=1).layer).extend(None))
    for x, same, y in zip(*ours, theirs, strict=True):
        assert x.dtype == same.dtype
        if not x.is_floating_point():
            continue
        assert (x - y).norm() <= 2 * (same - y).norm() + 1e-6 * y.norm()


@pytest.mark.parametrize("name", ["ssd", "gla", "gated_delta", "exp, fixed decay"])
def test_autocast_leaves_sums_as_they_are(name: str) -> None:
    whole = case(name, 50)
    single = whole._replace(
        layer=whole.layer.float(), inputs=to(torch.float32, whole.inputs), options=to(torch.float32, whole.options)
    )
    past = single.cut(0, 20).extend(None)
    expected = single.cut(20, 50).segment().after(past)
    with torch.autocast("cpu", torch.bfloat16):
        ours = single.cut(20, 50).segment().after(past)
    for x, y in zip(leaves(ours), leaves(expected), strict=True):
        assert torch.equal(x, y)


def to(dtype: torch.dtype, state: Any) -> Any:
    return (
        {name: to(dtype, x) for name, x in state.items()}
        if isinstance(state, dict)
        else map_state(lambda x: x.to(dtype), state)
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_positions_are_those_of_the_attention(masked: bool, packed: bool) -> None:
    """With a rotation, whose state holds the number of present tokens before the next one."""
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, named_attention("gla", num_heads=2, head_dim=4, causal=True), rotary=10.0)
    x = torch.randn(3, 20, 8)
    key_mask, starts = (
        torch.rand(3, 20) < share if wanted else None for share, wanted in ((0.6, masked), (0.2, packed))
    )
    position, state = None, None
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        options = {"key_mask": key_mask, "starts": starts}
        options = {name: None if mask is None else mask[:, start:stop] for name, mask in options.items()}
        position = position_segment(x[:, start:stop], **options).after(position)
        _, state = layer.extend(x[:, start:stop], state, **options)
        assert torch.equal(position, state.position)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (BlindspotAttention(linear("elu_plus_one"), 2), "^BlindspotAttention has no map of a segment.*DeltaAttention"),
        (RotaryAttention(LocalAttention(3, causal=True)), "^RotaryAttention has no map of a segment"),
        (
            SplitHeads((2, BlindspotAttention(linear("elu_plus_one"), 2)), (2, DeltaAttention())),
            "^BlindspotAttention has",
        ),
        (nn.Linear(3, 3), "^Linear has no map of a segment"),
        (named_attention("elu", num_heads=4, head_dim=CHANNELS), "causal attention, but LinearAttention is not causal"),
    ],
)
def test_layers_without_a_map_are_refused(layer: Any, message: str) -> None:
    _, k, v = heads(5)
    with pytest.raises(ValueError, match=message):
        segment(layer, k, v, gates=gates_of(getattr(layer, "needs", None), k))


@pytest.mark.usefixtures("unchecked")
def test_wrong_inputs_are_refused() -> None:
    _, k, v = heads(5)
    elu = linear("elu_plus_one").double()
    with pytest.raises(ValueError, match="every key must have a value"):
        segment(elu, k, v[:, :1])
    with pytest.raises(ValueError, match="takes no gates here"):
        segment(elu, k, v, gates=gates_of(GateNeeds("head"), k))
    with pytest.raises(ValueError, match="kept in range by a scale per token"):
        segment(linear("exp", GateNeeds("channel")), k, v, gates=gates_of(GateNeeds("channel"), k))
    with pytest.raises(ValueError, match="look ahead"):
        segment(TokenShift((1, 0, -1)), k[:, 0])
    with pytest.raises(ValueError, match=r"x must be \(b, n, 4\)"):
        segment(ShortConvolution(4, 2), k[:, 0])
