"""`Performer`: their numbers where they are right, every option's effect, and redrawing where it belongs."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linattn.compat.performer_pytorch import Performer
from tests.compat.performer_pytorch.original import original, performer

SIZE = {"dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
# options under which their mathematics is right: all is seen, or kernels without a maximum over all keys
SAME = {
    "plain": {},
    "relu": {"generalized_attention": True, "nb_features": 9},
    "efficient": {"no_projection": True},
    "reversible": {"reversible": True},
    "scalenorm": {"use_scalenorm": True},
    "rezero": {"use_rezero": True},
    "glu in chunks": {"ff_glu": True, "ff_mult": 3, "ff_chunks": 4},
    "shifted": {"shift_tokens": True},
    "biases": {"qkv_bias": False, "attn_out_bias": False},
    "cross": {"cross_attend": True},
    "all": {"cross_attend": True, "reversible": True, "shift_tokens": True, "use_scalenorm": True, "ff_glu": True},
    "causal": {"causal": True, "generalized_attention": True, "shift_tokens": True},
    "causal cross": {"causal": True, "no_projection": True, "shift_tokens": True, "cross_attend": True},
    "local": {"causal": True, "generalized_attention": True, "local_attn_heads": (1, 4), "local_window_size": 8},
}


def make(**options) -> Performer:
    model = Performer(**SIZE | options).double().eval()
    with torch.no_grad():
        # weights that tell branches apart, which near their initial values are small
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def tokens(n: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, n, 32, dtype=torch.float64)


def context(options: dict, m: int = 11) -> dict[str, Tensor]:
    return {"context": tokens(m)} if options.get("cross_attend") else {}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("n", [1, 63, 64])
def test_their_outputs(name, n):
    options = SAME[name]
    model, x, given = make(**options), tokens(n), context(options)
    # their local heads' angles are float32
    close = {"rtol": 1e-5, "atol": 1e-5} if name == "local" else {"rtol": 1e-9, "atol": 1e-9}
    assert_close(model(x, **given), performer(model, SIZE | options)(x, **given), **close)


def test_their_causal_softmax_without_its_floor(monkeypatch):
    monkeypatch.setattr(original, "softmax_kernel", partial(original.softmax_kernel, eps=0))
    model, x = make(causal=True, softmax_epsilon=0), tokens(65)
    assert_close(model(x), performer(model, SIZE | {"causal": True})(x), rtol=1e-9, atol=1e-9)


def test_their_rotary_positions():
    """Pairs of neighbours there, of the two halves here: the same numbers when the channels are reordered."""
    model, x = make(rotary_position_emb=True, nb_features=30), tokens(65)
    theirs = performer(model, SIZE | {"nb_features": 30}, rotary=True)
    table = original.FixedPositionalEmbedding(8, 65).double()
    assert_close(model(x), theirs(x, pos_emb=table(x)), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(theirs(x), theirs(x, pos_emb=table(x)), rtol=1e-3)


@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_r1_r2_gradients_in_every_mode(reversible, training):
    """Theirs: none, silently, where the input needs none; an error in evaluation."""
    model = make(reversible=reversible, cross_attend=True).train(training)
    model(tokens(9), context=tokens(7)).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())


EFFECTS = {
    "causal": {"causal": True},
    "local_attn_heads": {"local_attn_heads": 2},
    "local_attn_heads of each layer": {"local_attn_heads": (0, 3)},
    "ff_mult": {"ff_mult": 2},
    "nb_features": {"nb_features": 5},
    "reversible": {"reversible": True},
    "generalized_attention": {"generalized_attention": True},
    "use_scalenorm": {"use_scalenorm": True},
    "use_rezero": {"use_rezero": True},
    "ff_glu": {"ff_glu": True},
    "no_projection": {"no_projection": True},
    "qkv_bias": {"qkv_bias": False},
    "attn_out_bias": {"attn_out_bias": False},
    "shift_tokens": {"shift_tokens": True},
    "ortho_scaling": {"ortho_scaling": 1},
    "rotary_position_emb": {"rotary_position_emb": True},
    "softmax_epsilon": {"softmax_epsilon": 0.1},
    "dim_head": {"dim_head": 16},
    "heads": {"heads": 2},
    "depth": {"depth": 1},
}


class TestOptions:
    def output(self, x: Tensor, **options) -> Tensor:
        torch.manual_seed(0)
        return make(**options)(x)

    @pytest.mark.parametrize("name", EFFECTS)
    def test_has_an_effect(self, name):
        x = tokens(30)
        assert not torch.allclose(self.output(x, **EFFECTS[name]), self.output(x))

    @pytest.mark.parametrize("name", ["kernel_fn", "kernel_epsilon"])
    def test_kernels_have_an_effect(self, name):
        x, on = tokens(30), {"generalized_attention": True}
        value = {"kernel_fn": torch.sigmoid, "kernel_epsilon": 0.1}[name]
        assert not torch.allclose(self.output(x, **on, **{name: value}), self.output(x, **on))

    def test_window(self):
        x = tokens(30)
        small, large = (self.output(x, local_attn_heads=4, local_window_size=size) for size in (4, 64))
        assert not torch.allclose(small, large)

    @pytest.mark.parametrize("name", ["ff_dropout", "attn_dropout"])
    def test_dropout_acts_in_training_only(self, name):
        model, x = make(**{name: 0.5}, feature_redraw_interval=None), tokens(9)
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.allclose(model(x), model(x))

    def test_chunks_save_memory_and_change_nothing(self, monkeypatch):
        model, x = make(ff_chunks=4, depth=1), tokens(10)
        whole, lengths = make(depth=1), []
        whole.load_state_dict({name.replace("module.module.", "module."): t for name, t in model.state_dict().items()})
        feed_forward = model.net.branches[1].module.module
        feed_forward.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
        assert_close(model(x), whole(x))
        assert lengths == [3, 3, 3, 1]

    def test_cross_attend(self):
        x, first, second = tokens(9), tokens(5), tokens(5)
        model = make(cross_attend=True)
        assert not torch.allclose(model(x, context=first), model(x, context=second))

    def test_dim_head_need_not_be_given(self):
        """Their readme's first example has none, and is an error there."""
        assert Performer(dim=32, depth=1, heads=4, causal=True)(torch.randn(1, 9, 32)).shape == (1, 9, 32)
        assert Performer(dim=32, depth=1, heads=4, dim_head=None).net.branches[0].module.head_dim == 8

    def test_positional_arguments_are_theirs(self):
        mine, theirs = (
            kind(32, 2, 4, 8, (1, 2), 16, True, 2, 9, 5, True, 2, True, torch.nn.ReLU(), True).net.__class__.__name__
            for kind in (Performer, original.Performer)
        )
        assert mine == theirs == "ReversibleSequence"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_attn_heads": (1, 2, 3)}, "one a layer, of 2"),
        ({"local_attn_heads": 5}, "from 0 to 4 local heads"),
        ({"feature_redraw_interval": 0}, "at least 1"),
        ({"ff_chunks": 0}, "ff_chunks must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Performer(**SIZE | options)


def test_a_context_that_nothing_attends_to_is_refused():
    """Theirs leaves it out, silently."""
    with pytest.raises(ValueError, match="cross_attend is False"):
        make()(tokens(3), context=tokens(3))
    with pytest.raises(ValueError, match="none was given"):
        make(cross_attend=True)(tokens(3), context_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="needs its context"):
        make(cross_attend=True)(tokens(3))
    with pytest.raises(TypeError):
        make()(tokens(3), input_mask=torch.ones(2, 3, dtype=torch.bool))


def rows(model: Performer) -> Tensor:
    return torch.cat([t.flatten() for name, t in model.state_dict().items() if name.endswith("rows")]).clone()


def changes(model: Performer, steps: int) -> list[int]:
    changed, before = [], rows(model)
    for step in range(1, steps + 1):
        model(tokens(5)).sum().backward()
        after = rows(model)
        # all layers at once, and every number of each
        assert torch.equal(after, before) or not (after == before).any()
        if not torch.equal(after, before):
            changed.append(step)
        before = after
    return changed


class TestRedrawing:
    @pytest.mark.parametrize("reversible", [False, True])
    def test_p6_the_interval_is_a_number_of_training_forwards(self, reversible):
        model = make(feature_redraw_interval=2, reversible=reversible).train()
        assert changes(model, 5) == [3, 5]
        model.eval()
        assert changes(model, 5) == []

    def test_auto_check_redraw(self):
        model = make(feature_redraw_interval=2, auto_check_redraw=False).train()
        assert changes(model, 5) == []
        for _ in range(3):
            model.check_redraw_projections()
        assert changes(model, 1) == [] and model.proj_updater.calls_since_last_redraw == 1

    def test_none_is_never(self):
        assert changes(make(feature_redraw_interval=None).train(), 3) == []

    def test_p9_fixing_is_saved_and_nothing_is_saved_twice(self):
        model, other = (make(feature_redraw_interval=1).train() for _ in range(2))
        model.fix_projection_matrices_()
        other.load_state_dict(model.state_dict())
        assert changes(model, 3) == changes(other, 3) == []
        pointers = [tensor.data_ptr() for tensor in model.state_dict(keep_vars=True).values()]
        assert len(set(pointers)) == len(pointers)

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("reversible", [False, True])
    def test_p7_checkpointed_gradients_are_right(self, reentrant, reversible):
        plain = make(feature_redraw_interval=1, attn_dropout=0.2, reversible=reversible).train()
        other = copy.deepcopy(plain)
        for step in range(3):
            grads = []
            for run in (plain, lambda x: checkpoint(other, x, use_reentrant=reentrant)):
                torch.manual_seed(step)
                x = tokens(9).requires_grad_()
                run(x).sin().sum().backward()
                grads.append(x.grad)
            assert_close(*grads)
            for a, b in zip(plain.parameters(), other.parameters(), strict=True):
                assert_close(a.grad, b.grad)
        assert torch.equal(rows(plain), rows(other))

    @pytest.mark.parametrize("reversible", [False, True])
    def test_a_drawing_between_a_forward_and_its_backward(self, reversible):
        """Two forwards, one loss: saved activations do not care, and what computes them again says that it cannot."""
        model = make(feature_redraw_interval=1, reversible=reversible).train()
        x = tokens(9)
        first = model(x).sum()
        expected = None if reversible else torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
        model(x)
        if reversible:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                first.backward()
        else:
            assert_close(torch.autograd.grad(first, list(model.parameters())), expected)

    def test_evaluation_changes_nothing_and_draws_nothing(self):
        model = make(feature_redraw_interval=1, causal=True)
        x, state, randomness = tokens(5), copy.deepcopy(model.state_dict()), torch.get_rng_state()
        model(x), model.extend(x)
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), randomness)
