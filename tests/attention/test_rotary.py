import pytest
import torch
from torch.testing import assert_close

from linattn.attention import (
    InnerAttention,
    LinearAttention,
    LinformerAttention,
    LocalAttention,
    MeanPooling,
    RotaryLinearAttention,
    SoftmaxAttention,
)
from linattn.attention.rotary import RotaryAttention
from linattn.feature_maps import ElementwiseFeatureMap
from linattn.ops import LinearState
from linattn.ops.tokens.rotary import rotate
from tests import laws

INNER = {
    "local": lambda causal: LocalAttention(7, causal=causal, bucketed=True),
    "elu": lambda causal: LinearAttention(ElementwiseFeatureMap("elu_plus_one"), causal=causal),
    "softmax": lambda causal: SoftmaxAttention(causal=causal),
}
both = pytest.mark.parametrize("causal", [False, True])
every_inner = pytest.mark.parametrize("name", INNER)


def make(name: str, causal: bool) -> InnerAttention:
    return RotaryAttention(INNER[name](causal))


@both
@every_inner
@pytest.mark.parametrize("n", [0, 1, 63, 65])
def test_agrees_with_the_definition(name, causal, n):
    inner, (q, k, v) = make(name, causal), laws.tokens(n)
    places = torch.arange(n)
    assert_close(inner(q, k, v), INNER[name](causal)(rotate(q, places), rotate(k, places), v))


@both
@every_inner
def test_laws(name, causal):
    inner, x = make(name, causal), laws.tokens(50)
    for key_mask in laws.masks(50).values():
        laws.a_masked_key_is_a_missing_key(inner, *x, key_mask)
    laws.batch_elements_do_not_mix(inner, *x)
    laws.constant_values_come_back(inner, *x)
    if causal:
        laws.the_past_does_not_see_the_future(inner, *x, 33, rtol=1e-12)


@every_inner
@pytest.mark.parametrize("masked", [False, True])
def test_pieces_make_the_whole(name, masked):
    inner, x = make(name, True), laws.tokens(65)
    key_mask = laws.masks(65)["holes"] if masked else torch.ones(1, 1, 65, dtype=torch.bool)
    state, ys = None, []
    for piece in (slice(0, 1), slice(1, 40), slice(40, 40), slice(40, 65)):
        mask = key_mask[..., piece] if masked else None
        y, state = inner.extend(*(t[..., piece, :] for t in x), state, key_mask=mask)
        ys.append(y)
    present = key_mask.expand(2, 3, 65)
    assert_close(torch.cat(ys, -2)[present], inner(*x, key_mask=key_mask if masked else None)[present])


@both
def test_softmax_sees_only_how_far_apart_tokens_are(causal):
    """performer-pytorch's local heads look one window ahead of themselves."""
    inner = make("local", causal)
    same = torch.randn(5, dtype=torch.float64).expand(1, 1, 21, 5)
    weights = inner(same, same, torch.eye(21, dtype=torch.float64).expand(1, 1, 21, 21))[0, 0]
    assert (weights.argmax(-1) == torch.arange(21)).all()


@pytest.mark.usefixtures("unchecked")
def test_queries_and_keys_are_of_the_same_tokens():
    with pytest.raises(ValueError, match="the same tokens"):
        make("elu", False)(*laws.tokens(3, 5))


@every_inner
def test_the_causal_form(name):
    x = laws.tokens(20)
    assert_close(make(name, False).as_causal()(*x), make(name, True)(*x))


class Scaled(InnerAttention):
    """Somebody's own attention around another."""

    def __init__(self, inner: InnerAttention):
        super().__init__()
        self.inner, self.causal, self.state_kind = inner, inner.causal, inner.state_kind

    def _attend(self, q, k, v, key_mask):
        return self.inner(2 * q, k, v, key_mask=key_mask)

    def _extend(self, q, k, v, state, key_mask):
        return self.inner.extend(2 * q, k, v, state, key_mask=key_mask)


@every_inner
def test_the_causal_form_of_what_is_around_it(name):
    x, own = laws.tokens(20), Scaled(make(name, False))
    assert_close(own.as_causal()(*x), Scaled(make(name, True))(*x))
    assert not own.causal and not own.inner.causal


class Twice(InnerAttention):
    """Somebody's own attention with the same inner one at two places."""

    def __init__(self, inner: InnerAttention):
        super().__init__()
        self.first, self.second, self.causal = inner, inner, inner.causal

    def _extend(self, q, k, v, state, key_mask):
        first, second = state or (None, None)
        y, first = self.first.extend(q, k, v, first, key_mask=key_mask)
        other, second = self.second.extend(2 * q, k, v, second, key_mask=key_mask)
        return y + other, (first, second)


def test_the_causal_form_of_one_attention_at_two_places():
    x = laws.tokens(20)
    assert_close(Twice(make("elu", False)).as_causal()(*x), Twice(make("elu", True))(*x))


def test_what_has_no_causal_form_has_none_with_rotary_positions():
    assert RotaryAttention(LinformerAttention(MeanPooling(20, 5))).as_causal() is None


def test_a_state_of_fewer_heads_is_refused():
    """It would broadcast over the heads of the keys."""
    attention = RotaryLinearAttention(ElementwiseFeatureMap("elu_plus_one"), causal=True)
    x = laws.tokens(5)
    _, state = attention.extend(*x)
    for name in ("numerator", "denominator"):
        sums = getattr(state, name)
        fewer = state._replace(**{name: LinearState(sums.S[:, :1], sums.z[:, :1])})
        with pytest.raises(ValueError, match=name):
            attention.extend(*x, fewer)
