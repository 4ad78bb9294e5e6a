"""`SelfAttention`, `CrossAttention` and the walk-through's `Attention`, which is both."""

import pytest
import torch
from torch.testing import assert_close

from linattn.compat.performer_pytorch import Attention, CrossAttention, SelfAttention
from tests import laws
from tests.compat.performer_pytorch.original import original, take_attention

DIM = 32
MODES = {
    "softmax": {},
    "relu": {"generalized_attention": True},
    "efficient": {"no_projection": True},
    "bias": {"qkv_bias": True, "attn_out_bias": False},
    "heads": {"heads": 2, "dim_head": None, "nb_features": 7},
}
every_mode = pytest.mark.parametrize("mode", MODES)


def make(kind: type, **options):
    return kind(DIM, **{"heads": 4, "dim_head": 8} | options).double().eval()


def local(local_heads: int) -> dict[str, int]:
    """A window is refused where no head has one."""
    return {"local_heads": local_heads, "local_window_size": 5} if local_heads else {}


def with_fast_heads(local_heads: int, mode: str) -> dict[str, bool]:
    """So is a kind of fast heads where none of the 4 is fast."""
    return MODES[mode] if local_heads < 4 else {}


def tokens(n: int) -> torch.Tensor:
    return torch.randn(2, n, DIM, dtype=torch.float64)


def theirs(kind: str, ours, **options):
    there = getattr(original, kind)(DIM, **{"heads": 4, "dim_head": 8} | options).double().eval()
    return take_attention(there, ours.attention)


@every_mode
@pytest.mark.parametrize("n", [1, 63, 200])
def test_their_outputs(mode, n):
    x, context = tokens(n), tokens(65)
    ours = make(SelfAttention, **MODES[mode])
    assert_close(ours(x), theirs("SelfAttention", ours, **MODES[mode])(x), rtol=1e-10, atol=1e-10)
    ours = make(CrossAttention, **MODES[mode])
    expected = theirs("CrossAttention", ours, **MODES[mode])(x, context=context)
    assert_close(ours(x, context=context), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("local_heads", [1, 4])
@pytest.mark.parametrize("n", [1, 16, 33, 65])
def test_their_outputs_with_local_heads(local_heads, n):
    """Causal: in the other direction theirs are turned wrongly, and attend to the padding that they make."""
    options = {"causal": True, "local_heads": local_heads, "local_window_size": 16} | with_fast_heads(
        local_heads, "relu"
    )
    ours, x = make(SelfAttention, **options), tokens(n)
    # their local heads' angles are float32
    assert_close(ours(x), theirs("SelfAttention", ours, **options)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("local_heads", [0, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["softmax", "relu", "efficient"])
def test_p1_the_mask_is_a_mask(mode, causal, local_heads):
    attention = make(SelfAttention, causal=causal, **local(local_heads), **with_fast_heads(local_heads, mode))
    x, mask = tokens(50), torch.rand(2, 50) < 0.6
    y = attention(x + torch.where(mask, 0, 1e3).unsqueeze(-1), mask=mask)
    for row, kept in enumerate(mask):
        assert_close(y[row : row + 1, kept], attention(x[row : row + 1, kept]))


@pytest.mark.parametrize("mode", ["softmax", "relu", "efficient"])
def test_p1_the_mask_of_a_context_is_a_mask(mode):
    attention, x, context = make(CrossAttention, **MODES[mode]), tokens(9), tokens(50)
    mask = torch.rand(2, 50) < 0.6
    y = attention(x, context=context, context_mask=mask)
    for row, kept in enumerate(mask):
        one = slice(row, row + 1)
        assert_close(y[one], attention(x[one], context=context[one, kept]))


def test_the_example_of_their_issue():
    """The output at 64 of 256 real tokens: theirs is a quarter."""
    attention = make(SelfAttention, generalized_attention=True, attn_out_bias=False)
    x, mask = tokens(256), (torch.arange(256) < 64).expand(2, 256)
    assert_close(attention(x, mask=mask)[:, :64].norm(), attention(x[:, :64]).norm())


@pytest.mark.parametrize(("local_heads", "rotary"), [(0, False), (0, True), (1, False), (1, True), (4, False)])
def test_extend(local_heads, rotary):
    attention = make(SelfAttention, causal=True, **local(local_heads), rotary_position_emb=rotary)
    x = tokens(40)
    first, state = attention.extend(x[:, :13])
    second, _ = attention.extend(x[:, 13:], state)
    assert_close(torch.cat([first, second], 1), attention(x))


def test_attention_is_both():
    attention, x, context = make(Attention), tokens(9), tokens(20)
    mask, context_mask = torch.rand(2, 9) < 0.7, torch.rand(2, 20) < 0.7
    itself, other = make(SelfAttention), make(CrossAttention)
    for part in (itself, other):
        part.attention.load_state_dict(attention.attention.state_dict())
    assert_close(attention(x, mask=mask), itself(x, mask=mask))
    assert_close(attention(x, context=context, context_mask=context_mask), other(x, context, context_mask))


class TestOptions:
    def outputs(self, x: torch.Tensor, **options) -> torch.Tensor:
        torch.manual_seed(0)
        return make(SelfAttention, **options)(x)

    @pytest.mark.parametrize(
        "options",
        [
            {"causal": True},
            {"local_heads": 1},
            {"nb_features": 5},
            {"generalized_attention": True},
            {"no_projection": True},
            {"qkv_bias": True},
            {"attn_out_bias": False},
            {"ortho_scaling": 1},
            {"rotary_position_emb": True},
            {"softmax_epsilon": 0.1},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_has_an_effect(self, options):
        x = tokens(30)
        assert not torch.allclose(self.outputs(x, **options), self.outputs(x))

    def test_kernels_have_an_effect(self):
        x, on = tokens(30), {"generalized_attention": True}
        assert not torch.allclose(self.outputs(x, **on), self.outputs(x, **on, kernel_fn=torch.sigmoid))
        assert not torch.allclose(self.outputs(x, **on), self.outputs(x, **on, kernel_epsilon=0.1))

    def test_window(self):
        x, on = tokens(30), {"local_heads": 4}
        assert not torch.allclose(self.outputs(x, **on), self.outputs(x, **on, local_window_size=4))

    def test_dropout(self):
        attention = make(SelfAttention, dropout=0.5)
        x = tokens(30)
        assert torch.equal(attention(x), attention(x)) and (attention.train()(x) == 0).double().mean() > 0.3

    def test_heads_and_channels(self):
        assert make(SelfAttention, heads=3, dim_head=16).attention.q_proj.weight.shape == (48, 32)
        assert make(SelfAttention, heads=2, dim_head=None).attention.q_proj.weight.shape == (32, 32)
        assert SelfAttention(DIM).attention.q_proj.weight.shape == (512, 32)

    def test_p6_a_layer_alone_redraws_too(self):
        attention, x = make(SelfAttention, feature_redraw_interval=2).train(), tokens(4)
        rows = attention.state_dict()["attention.inner.feature_map.projection.rows"]
        before, changed = rows.clone(), []
        for _ in range(4):
            attention(x)
            changed.append(not torch.equal(before, rows))
            before = rows.clone()
        assert changed == [False, False, True, False]


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_a_context_has_other_places(self):
        for options in ({"local_heads": 1}, {"rotary_position_emb": True}):
            with pytest.raises(ValueError, match="belong to self attention"):
                CrossAttention(DIM, **options)
            with pytest.raises(ValueError, match="belong to self attention"):
                Attention(DIM, **options)(tokens(3), context=tokens(3))

    def test_cross_attention_is_not_causal(self):
        with pytest.raises(ValueError, match="must not be causal"):
            CrossAttention(DIM, causal=True)

    def test_too_many_local_heads(self):
        with pytest.raises(ValueError, match=r"from 0 to 8 local heads.*there are 9"):
            SelfAttention(DIM, local_heads=9)

    def test_heads_that_do_not_divide(self):
        with pytest.raises(ValueError, match="3 and 32"):
            SelfAttention(DIM, heads=3, dim_head=None)

    def test_a_mask_without_its_context(self):
        with pytest.raises(ValueError, match="none was given"):
            Attention(DIM)(tokens(3).float(), context_mask=torch.ones(2, 3, dtype=torch.bool))

    def test_unknown_arguments_raise(self):
        """Theirs swallows them: `input_mask` has no effect there."""
        x, mask = tokens(3), torch.ones(2, 3, dtype=torch.bool)
        with pytest.raises(TypeError):
            make(SelfAttention)(x, input_mask=mask)
        with pytest.raises(TypeError):
            make(SelfAttention)(x, context=x)
        with pytest.raises(TypeError):
            make(CrossAttention)(x)


def test_inputs_are_not_modified():
    """Theirs zeroes values in place."""
    attention, x = make(SelfAttention), tokens(20)
    mask = laws.masks(20)["left"].squeeze(1)
    copies = x.clone(), mask.clone()
    attention(x, mask=mask)
    assert torch.equal(x, copies[0]) and torch.equal(mask, copies[1])
