import pytest
import torch
from torch.testing import assert_close

from linattn.attention import named_attention
from linattn.compat.linear_attention_transformer.axial import AxialAttention
from linattn.ops.nested import map_state
from tests import laws
from tests.attention.cases import CHANNELS, HEADS, KEY_HEADS, heads

WINDOW = 8
LENGTHS = (0, 1, 2, 7, 8, 9, 63, 64, 65, 200)
every_inner = pytest.mark.parametrize("name", ["softmax", "elu", "efficient", "local+taylor"])
either_order = pytest.mark.parametrize("causal", [True, False])


def make(name: str, causal: bool, window: int = WINDOW) -> AxialAttention:
    inner = named_attention(name, num_heads=HEADS, num_key_heads=KEY_HEADS, head_dim=CHANNELS, causal=causal, window=3)
    return AxialAttention(inner, window).double()


@every_inner
@either_order
@pytest.mark.parametrize("n", LENGTHS)
def test_each_column_is_a_sequence(name, causal, n):
    axial, (q, k, v) = make(name, causal), heads(n)
    y = axial(q, k, v)
    for column in range(WINDOW):
        here = slice(column, None, WINDOW)
        alone = axial.inner(*(x[..., here, :] for x in (q, k, v)))
        assert_close(y[..., here, :], alone)


@every_inner
@pytest.mark.parametrize("masked", [False, True])
def test_pieces_make_the_whole(name, masked):
    axial, parts = make(name, True), heads(60)
    mask = torch.rand(2, 1, 60) < 0.6 if masked else None
    state, pieces = None, []
    for start, stop in ((0, 0), (0, 13), (13, 14), (14, 15), (15, 60)):
        q, k, v = (x[..., start:stop, :] for x in parts)
        y, state = axial.extend(q, k, v, state, key_mask=None if mask is None else mask[..., start:stop])
        pieces.append(y)
    assert_close(torch.cat(pieces, -2), axial(*parts, key_mask=mask))


@every_inner
@either_order
@pytest.mark.parametrize("where", ["left", "right", "holes", "all"])
def test_a_masked_key_is_a_missing_key(name, causal, where):
    laws.a_masked_key_is_a_missing_key(make(name, causal), *heads(41), laws.masks(41)[where])


def test_the_state_has_the_batch_in_front():
    axial, (q, k, v) = make("efficient", True), heads(21, b=3)
    _, state = axial.extend(q, k, v)
    chosen = map_state(lambda x: x[[2, 0]], state)
    assert_close(axial.extend(q[[2, 0]], k[[2, 0]], v[[2, 0]], chosen)[0], axial.extend(q, k, v, state)[0][[2, 0]])


@every_inner
def test_the_causal_form(name):
    form, parts = make(name, False).as_causal(), heads(41)
    assert_close(form(*parts), make(name, True)(*parts))


@either_order
def test_a_window_of_one_is_the_inner_attention(causal):
    axial, parts = make("elu", causal, window=1), heads(20)
    assert_close(axial(*parts), axial.inner(*parts))


def test_gradients():
    axial = make("elu", True, window=3)
    parts = [x.requires_grad_() for x in heads(7, b=1)]
    assert torch.autograd.gradcheck(axial, parts)


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_refused():
    gated = named_attention("gla", num_heads=4, head_dim=6, causal=True)
    with pytest.raises(ValueError, match="AxialAttention makes no gates, but LinearAttention needs some"):
        AxialAttention(gated, 4)
    with pytest.raises(ValueError, match="at least one token"):
        make("elu", True, window=0)
    with pytest.raises(ValueError, match=r"must be \(b, 1, n\)"):
        make("elu", True)(*heads(5), key_mask=torch.ones(2, KEY_HEADS, 5, dtype=torch.bool))
    with pytest.raises(NotImplementedError):
        make("elu", False).extend(*heads(5))
