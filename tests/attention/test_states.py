"""What an attention left is taken by the same attention only, or refused by name; one sequence's state serves many."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.attention import (
    InnerAttention,
    LinearAttention,
    LocalAttention,
    RotaryAttention,
    SoftmaxAttention,
    SplitHeads,
    map_state,
    named_attention,
)
from linattn.compat.linear_attention_transformer.axial import AxialAttention
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from linattn.compat.performer_pytorch.floored_favor import FlooredFavorAttention
from linattn.feature_maps import ElementwiseFeatureMap, FavorFeatureMap
from tests.attention.cases import CAUSAL, CHANNELS, HEADS, KEY_HEADS, LONGEST, GatesFromKeys, heads, make

pytestmark = pytest.mark.usefixtures("unchecked")


def elu() -> LinearAttention:
    return LinearAttention(ElementwiseFeatureMap("elu_plus_one"), causal=True)


def local(window: int, *, bucketed: bool = False) -> InnerAttention:
    return LocalAttention(window, causal=True, bucketed=bucketed)


# what has no name of its own, and other options of what has
UNNAMED: dict[str, Callable[[], InnerAttention]] = {
    "blindspot 2": lambda: BlindspotAttention(elu(), 2),
    "blindspot 3": lambda: BlindspotAttention(elu(), 3),
    "local 5": lambda: local(5),
    "local bucketed 5": lambda: local(5, bucketed=True),
    "floored": lambda: FlooredFavorAttention(FavorFeatureMap(CHANNELS, 8), epsilon=1e-3, causal=True),
    "rotary softmax": lambda: RotaryAttention(SoftmaxAttention(causal=True)),
    "rotary elu": lambda: RotaryAttention(elu()),
    "axial 2": lambda: AxialAttention(elu(), 2),
    "axial 3": lambda: AxialAttention(elu(), 3),
    "axial local": lambda: AxialAttention(local(5), 3),
    "four parts": lambda: SplitHeads((2, elu()), (2, elu())),
    "elu twice": lambda: SplitHeads((2, local(5)), (2, elu())),
    "one part": lambda: SplitHeads((4, elu())),
}
NAMED = [spec for spec, _ in CAUSAL]
CASES = [*NAMED, *UNNAMED]


def build(case: str) -> InnerAttention:
    return UNNAMED[case]().double() if case in UNNAMED else make(case, True)


def form(state: Any) -> Any:
    """Everything about a state but its numbers."""
    if isinstance(state, tuple):
        return type(state).__name__, *map(form, state)
    return (tuple(state.shape), state.dtype) if isinstance(state, Tensor) else state


def test_a_state_of_another_attention_is_refused() -> None:
    """Of each pair: unless the two states cannot be told apart, as those of feature maps of the same width."""
    attentions, x = {case: build(case) for case in CASES}, heads(5)
    states = {case: inner.extend(*x)[1] for case, inner in attentions.items()}
    for case, inner in attentions.items():
        for other, state in states.items():
            if form(state) == form(states[case]):
                inner.extend(*x, state)
            else:
                with pytest.raises(ValueError, match=r"^the state"):
                    inner.extend(*x, state)
                    pytest.fail(f"{case} takes the state of {other}")


@pytest.mark.parametrize("spec", NAMED)
def test_a_state_of_other_inputs_is_refused(spec: str) -> None:
    """Of other widths, numbers of heads, dtypes, or no state at all."""

    def left(
        h: int = HEADS, hk: int = KEY_HEADS, d: int = CHANNELS, dv: int = CHANNELS, dtype: Any = torch.float64
    ) -> Any:
        name = spec if h == HEADS else spec.replace(":2", ":4")
        sizes = {"num_heads": h, "num_key_heads": hk, "head_dim": d}
        other = named_attention(name, causal=True, window=17, max_length=LONGEST, **sizes).to(dtype)
        other = other if other.needs is None else GatesFromKeys(other)
        return other.extend(*(torch.randn(2, *size, dtype=dtype) for size in ((h, 5, d), (hk, 5, d), (hk, 5, dv))))[1]

    inner, x = make(spec, True), heads(3)
    inner.extend(*x, left())
    wrong = [left(d=8), left(dv=8), left(hk=4), left(h=8, hk=4), left(dtype=torch.float32)]
    for state in [state for state in wrong if form(state) != form(left())]:
        with pytest.raises(ValueError, match=r"^the state.*(must be|must have) .*but (is|has)"):
            inner.extend(*x, state)
    for state in (x[0], (), 3, "elu", [left()]):
        with pytest.raises(ValueError, match=r"^the state must be"):
            inner.extend(*x, state)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_state_of_one_sequence_serves_many(case: str, masked: bool) -> None:
    """As if it were repeated; likewise the same new tokens after many states."""
    inner = build(case)
    key_mask = torch.rand(3, 1, 4) < 0.6 if masked else None
    for past, new in ((1, 3), (3, 1)):
        _, state = inner.extend(*heads(9, b=past))
        x, mask = heads(4, b=new), None if key_mask is None else key_mask[:new]
        y, after = inner.extend(*x, state, key_mask=mask)
        repeated = map_state(lambda t, past=past: t.expand(3 // past * past, *t.shape[1:]), state)
        expected, expected_after = inner.extend(*(t.expand(3, *t.shape[1:]) for t in x), repeated, key_mask=mask)
        assert_close(y, expected)
        assert form(after) == form(expected_after)
        again = heads(2, b=3)
        assert_close(inner.extend(*again, after)[0], inner.extend(*again, expected_after)[0])
    _, state = inner.extend(*heads(9, b=2))
    with pytest.raises(ValueError, match="batch sizes must be the same, or 1, but they are q 3, k 3, v 3, state 2"):
        inner.extend(*heads(4, b=3), state)


@pytest.mark.parametrize("made", [2, 4])
@pytest.mark.parametrize("used", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_a_state_of_another_blindspot_is_refused(made: int, used: int, masked: bool) -> None:
    """Whether its rows have blocks in step or not."""
    key_mask = torch.tensor([[[True, False, True]], [[True, True, True]]]) if masked else None
    x = heads(3)
    attention = BlindspotAttention(elu(), used)
    _, state = BlindspotAttention(elu(), made).extend(*x, key_mask=key_mask)
    for mask in (None, key_mask):
        if made == used:
            attention.extend(*x, state, key_mask=mask)
        else:
            with pytest.raises(ValueError, match=f"made with a blindspot of {made}, but here it is {used}"):
                attention.extend(*x, state, key_mask=mask)
