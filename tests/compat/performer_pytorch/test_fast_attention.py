"""`FastAttention` in each mode: performer-pytorch's numbers where its mathematics is right, laws where it is not."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from linattn.compat.performer_pytorch import FastAttention
from tests import laws
from tests.compat.performer_pytorch.original import fast_attention, original

MODES = {
    "softmax": {"nb_features": 20},
    "relu": {"nb_features": 20, "generalized_attention": True},
    "tanh": {"nb_features": 20, "generalized_attention": True, "kernel_fn": torch.tanh},
    "efficient": {"no_projection": True},
}
every_mode = pytest.mark.parametrize("mode", MODES)
both = pytest.mark.parametrize("causal", [False, True])


def heads(n: int, std: float = 1.0) -> list[torch.Tensor]:
    return [std * torch.randn(2, 3, n, 8, dtype=torch.float64) for _ in range(3)]


@every_mode
@pytest.mark.parametrize("n", [1, 63, 64, 200])
def test_their_outputs_where_all_is_seen(mode, n):
    ours, x = FastAttention(8, **MODES[mode]).double(), heads(n)
    assert_close(ours(*x), fast_attention(ours, **MODES[mode])(*x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["relu", "efficient"])
@pytest.mark.parametrize("n", [1, 63, 64, 200])
def test_their_causal_outputs(mode, n):
    ours, x = FastAttention(8, causal=True, **MODES[mode]).double(), heads(n)
    assert_close(ours(*x), fast_attention(ours, **MODES[mode])(*x), rtol=1e-10, atol=1e-10)


def test_their_causal_softmax_without_its_floor(monkeypatch):
    monkeypatch.setattr(original, "softmax_kernel", partial(original.softmax_kernel, eps=0))
    ours, x = FastAttention(8, 20, causal=True, softmax_epsilon=0).double(), heads(65)
    assert_close(ours(*x), fast_attention(ours)(*x), rtol=1e-10, atol=1e-10)


def test_causal_softmax_is_theirs_of_each_prefix():
    """With the floor, their output for a token depends on later keys; ours is theirs when there are none."""
    ours, x = FastAttention(8, 20, causal=True).double(), heads(33)
    theirs, y = fast_attention(ours), ours(*x)
    for n in (1, 2, 20, 33):
        alone = theirs(*(t[..., :n, :] for t in x))
        assert_close(y[..., n - 1, :], alone[..., -1, :], rtol=1e-10, atol=1e-10)


# tanh has similarities of both signs, and denominators may be nearly zero
@pytest.mark.parametrize("mode", ["softmax", "relu", "efficient"])
@both
def test_laws(mode, causal):
    inner, x = FastAttention(8, causal=causal, **MODES[mode]).double(), heads(50)
    for key_mask in laws.masks(50).values():
        laws.a_masked_key_is_a_missing_key(inner, *x, key_mask)
        laws.inputs_are_not_modified(inner, *x, key_mask)
    laws.batch_elements_do_not_mix(inner, *x)
    laws.constant_values_come_back(inner, *x)
    if causal:
        laws.the_past_does_not_see_the_future(inner, *x, 31, rtol=1e-12)


def test_p1_padding_does_not_shrink_outputs():
    inner, x, key_mask = FastAttention(8, generalized_attention=True).double(), heads(256), torch.arange(256) < 64
    alone = inner(*(t[..., :64, :] for t in x))
    assert_close(inner(*x, key_mask=key_mask.expand(1, 1, 256))[..., :64, :], alone)


def test_p2_a_large_last_key_does_not_change_the_past():
    q, k, v = torch.randn(3, 1, 1, 64, 64, dtype=torch.float64)
    inner = FastAttention(64, causal=True).double()
    before = inner(q, k, v)
    for factor in (2, 4, 6, 100):
        louder = k.clone()
        louder[:, :, -1] *= factor
        assert torch.equal(inner(q, louder, v)[:, :, :-1], before[:, :, :-1])


@pytest.mark.parametrize("mode", ["softmax", "relu", "efficient"])
@both
def test_half_precision_at_length(mode, causal):
    """Theirs: NaN in fp16 (2,048 ReLU features or 1,024 causal softmax ones are summed in fp16)."""
    inner, x = FastAttention(8, causal=causal, **MODES[mode]).double(), heads(2048, 0.5)
    y = inner(*(t.half() for t in x))
    assert y.dtype == torch.float16
    assert_close(y.double(), inner(*x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("mode", ["softmax", "efficient"])
@pytest.mark.parametrize("std", [4, 32, 100])
def test_b4_large_inputs_do_not_overflow(mode, std):
    inner = FastAttention(8, causal=True, **MODES[mode])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.isfinite(inner(*(t.to(dtype) for t in heads(65, std)))).all()


class TestOptions:
    def test_nb_features(self):
        assert FastAttention(64).nb_features == original.FastAttention(64).nb_features == 266
        assert FastAttention(64, 100).projection_matrix.shape == (100, 64)
        assert FastAttention(64, 100, generalized_attention=True).projection_matrix.shape == (100, 64)

    def test_ortho_scaling(self):
        for options in ({}, {"generalized_attention": True}):
            lengths = FastAttention(8, 30, ortho_scaling=1, **options).projection_matrix.norm(dim=-1)
            assert_close(lengths, torch.full((30,), 8**0.5))
            assert FastAttention(8, 30, **options).projection_matrix.norm(dim=-1).std() > 0.1

    def test_kernel_fn(self):
        """Any ReLU is the default, which may be given where there is no kernel: performer-pytorch's readme does so."""
        x = heads(9)

        def run(**options):
            torch.manual_seed(0)
            return FastAttention(8, **options)(*x)

        generalized = run(generalized_attention=True)
        assert not torch.allclose(generalized, run(generalized_attention=True, kernel_fn=nn.Softplus()))
        for relu in (nn.ReLU(), torch.relu, F.relu):
            assert torch.equal(generalized, run(generalized_attention=True, kernel_fn=relu))
            assert torch.equal(run(), run(kernel_fn=relu))

    def test_epsilons(self):
        x = heads(9)
        for causal in (False, True):
            for name, options in (("softmax_epsilon", {}), ("kernel_epsilon", {"generalized_attention": True})):
                ys = []
                for epsilon in (0.0, 1e-2, 1e3):
                    torch.manual_seed(0)
                    ys.append(FastAttention(8, causal=causal, **options, **{name: epsilon})(*x))
                assert not torch.allclose(ys[0], ys[1])
                # far above all features, the floor makes all keys alike
                count = torch.arange(1, 10).unsqueeze(-1) if causal else 9
                mean = x[2].cumsum(-2) / count if causal else x[2].mean(-2, keepdim=True).expand_as(x[2])
                assert_close(ys[2], mean, rtol=0.02, atol=0.02)

    def test_no_projection_has_none(self):
        inner = FastAttention(8, no_projection=True)
        assert inner.projection_matrix is None and inner.nb_features == 8 and not inner.state_dict()

    def test_unknown_arguments_raise(self):
        with pytest.raises(TypeError, match="nb_feature"):
            FastAttention(8, nb_feature=20)  # pyright: ignore[reportCallIssue]


def test_redraw_projection_matrix():
    inner = FastAttention(8)
    before = inner.projection_matrix.clone()
    inner.redraw_projection_matrix("cpu")
    assert not torch.equal(inner.projection_matrix, before)
    with pytest.raises(ValueError, match="cannot be redrawn on cuda"):
        inner.redraw_projection_matrix("cuda")
    FastAttention(8, no_projection=True).redraw_projection_matrix("cpu")


@every_mode
def test_extend(mode):
    inner, x = FastAttention(8, causal=True, **MODES[mode]).double(), heads(65)
    first, state = inner.extend(*(t[..., :30, :] for t in x))
    second, _ = inner.extend(*(t[..., 30:, :] for t in x), state)
    assert_close(torch.cat([first, second], -2), inner(*x))


@pytest.mark.parametrize("mode", ["softmax", "relu", "efficient"])
def test_forward_draws_nothing(mode):
    inner, x = FastAttention(8, causal=True, **MODES[mode]), heads(9)
    state = torch.get_rng_state()
    assert torch.equal(inner(*x), inner(*x)) and torch.equal(torch.get_rng_state(), state)
