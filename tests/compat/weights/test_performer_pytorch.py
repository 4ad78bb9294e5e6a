"""Weights of performer-pytorch itself, over its options: the same outputs."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.compat import weights
from linattn.compat.performer_pytorch import (
    Attention,
    CrossAttention,
    FastAttention,
    Performer,
    PerformerEncDec,
    PerformerLM,
    SelfAttention,
)
from tests.compat.weights.old import tables, trained

with warnings.catch_warnings():
    # distutils, at its import
    warnings.simplefilter("ignore", DeprecationWarning)
    pytest.importorskip("performer_pytorch")
    from performer_pytorch import performer_pytorch as original
    from performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper
    from performer_pytorch.performer_enc_dec import PerformerEncDec as TheirEncDec

SIZE = {"num_tokens": 19, "max_seq_len": 48, "dim": 16, "depth": 2, "heads": 4, "dim_head": 6, "nb_features": 10}
LOCAL = {"local_attn_heads": (1, 4), "local_window_size": 8}
RELU = {"generalized_attention": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default features": {"nb_features": None},
    "learned positions": {"rotary_position_emb": False},
    "axial": {"rotary_position_emb": False, "axial_position_emb": True},
    "axial of a shape": {
        "rotary_position_emb": False,
        "axial_position_emb": True,
        "axial_position_shape": (2, 4, 6),
    },
    "axial, ignored": {"axial_position_emb": True, "axial_position_shape": (8, 6)},
    "tied": {"tie_embed": True, "reversible": True},
    "biases": {"qkv_bias": True, "attn_out_bias": True, "ff_mult": 2},
    "local": LOCAL,
    "local, biases, reversible": LOCAL | {"qkv_bias": True, "reversible": True},
    "local, causal": LOCAL | RELU | {"causal": True},
    "gated, in chunks": {"ff_glu": True, "ff_chunks": 3, "reversible": True},
    "scale norm": {"use_scalenorm": True, "use_rezero": True},
    "ReZero": {"use_rezero": True, "shift_tokens": True},
    "shifted": {"shift_tokens": True, "reversible": True},
    "ReLU, causal, shifted": RELU | {"causal": True, "shift_tokens": True},
    "sigmoid": RELU | {"kernel_fn": torch.sigmoid},
    "no projection": {"no_projection": True, "generalized_attention": True} | LOCAL,
    "no projection, causal": {"no_projection": True, "causal": True},
    "context": RELU | {"cross_attend": True, "causal": True, "reversible": True, "shift_tokens": True},
    "context, both ways": {"cross_attend": True, "use_scalenorm": True, "ff_glu": True},
    "never redrawn": {"feature_redraw_interval": None, "auto_check_redraw": False},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def without_epsilon(model: nn.Module) -> nn.Module:
    """The 10⁻⁶ in their causal denominator left out: it makes outputs smaller."""
    for part in model.modules():
        if isinstance(part, original.FastAttention):
            part.causal_linear_fn = partial(original.causal_linear_attention_noncuda, eps=0)
    return model


def old_language_model(options: dict[str, Any]) -> nn.Module:
    model = trained(original.PerformerLM(**SIZE | options))
    tables(model)
    return without_epsilon(model)


def context(options: dict[str, Any]) -> dict[str, Tensor]:
    return {"context": torch.randn(2, 11, 16, dtype=torch.float64)} if options.get("cross_attend") else {}


@every_kind
def test_language_models_give_their_outputs(options):
    old = old_language_model(options)
    new = weights.load(PerformerLM, SIZE | options, old.state_dict())
    x, given = torch.randint(19, (2, 48)), context(options)
    assert_close(new(x, **given), old(x, **given), rtol=1e-10, atol=1e-10)
    encodings = old(x, return_encodings=True, **given)
    assert_close(new(x, return_encodings=True, **given), encodings, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "local, biases, reversible", "ReLU, causal, shifted", "context", "ReZero"])
def test_stacks_give_their_outputs(name):
    config = {key: value for key, value in (SIZE | KINDS[name]).items() if key not in ("num_tokens", "max_seq_len")}
    old = without_epsilon(trained(original.Performer(**config)))
    tables(old)
    new = weights.load(Performer, config, old.state_dict())
    x, given = torch.randn(2, 48, 16, dtype=torch.float64), context(config)
    assert_close(new(x, **given), old(x, **given), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "local", "ReLU, causal, shifted", "no projection"])
def test_as_they_are_saved(name):
    """In float32, with the package's tables."""
    config = SIZE | KINDS[name]
    old = without_epsilon(original.PerformerLM(**config).eval())
    new = weights.load(PerformerLM, config, old.state_dict())
    x = torch.randint(19, (2, 48))
    assert_close(new(x), old(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [SelfAttention, Attention, CrossAttention])
@pytest.mark.parametrize("options", [{}, RELU, {"local_heads": 1, "qkv_bias": True}, {"no_projection": True}], ids=str)
def test_layers_alone_give_their_outputs(kind, options):
    if kind is CrossAttention and "local_heads" in options:
        pytest.skip("a context has other places")
    config = {"dim": 16, "heads": 4, "dim_head": 6, "local_window_size": 8} | options
    old = trained(getattr(original, kind.__name__)(**config))
    tables(old)
    new = weights.load(kind, config, old.state_dict())
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    given = {"context": torch.randn(2, 9, 16, dtype=torch.float64)} if kind is CrossAttention else {}
    assert_close(new(x, **given), old(x, **given), rtol=1e-10, atol=1e-10)


def test_a_layer_alone_with_the_rotary_positions_that_theirs_is_given():
    config = {"dim": 16, "heads": 4, "dim_head": 6, "local_heads": 1, "local_window_size": 8}
    old = trained(original.SelfAttention(**config))
    positions = nn.Module()
    positions.layer_pos_emb = original.FixedPositionalEmbedding(6, 24)
    tables(old), tables(positions)
    new = weights.load(SelfAttention, config | {"rotary_position_emb": True}, old.state_dict())
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    assert_close(new(x), old(x, pos_emb=positions.layer_pos_emb(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, RELU, {"no_projection": True}], ids=str)
def test_fast_attention_gives_its_outputs(options):
    config = {"dim_heads": 6, "nb_features": 10} | options
    old = original.FastAttention(**config).double()
    new = weights.load(FastAttention, config, old.state_dict()).double()
    q, k, v = torch.randn(3, 2, 4, 20, 6, dtype=torch.float64)
    assert_close(new(q, k, v), old(q, k, v), rtol=1e-10, atol=1e-10)


# what theirs takes and overwrites
SAID = {"dec_causal": True, "dec_cross_attend": False, "enc_no_projection": True, "enc_tie_embed": True}


@pytest.mark.parametrize("tied", [{}, {"tie_token_embeds": True} | SAID, {"tie_token_embed": True}], ids=str)
@pytest.mark.parametrize("no_projection", [False, True])
def test_encoder_and_decoder(tied, no_projection):
    """`tie_token_embed`, the readme's name, ties nothing there: two embeddings are what was trained."""
    both = {name: value for name, value in SIZE.items() if name != "dim"} | RELU
    own = {"enc_reversible": True, "enc_tie_embed": False, "dec_ff_glu": True, "dec_tie_embed": True}
    config = {f"{part}_{name}": value for part in ("enc", "dec") for name, value in both.items()} | own | tied
    config |= {"dim": 16, "no_projection": no_projection}
    old = trained(TheirEncDec(**config))
    tables(old.enc), tables(old.dec.net), without_epsilon(old)
    new = weights.load(PerformerEncDec, config, old.state_dict())
    source, target = torch.randint(1, 19, (2, 30)), torch.randint(1, 19, (2, 20))
    theirs = old.dec.net(target, context=old.enc(source, return_encodings=True))
    assert_close(new(source, target, return_loss=False), theirs, rtol=1e-10, atol=1e-10)
    assert (new.enc.embedding is new.dec.net.embedding) == ("tie_token_embeds" in tied)


def test_in_its_wrapper():
    config = SIZE | RELU | {"causal": True}
    old = without_epsilon(original.PerformerLM(**config).eval())
    new = weights.load(PerformerLM, config, AutoregressiveWrapper(old).state_dict())
    x = torch.randint(19, (2, 48))
    assert_close(new(x), old(x), rtol=1e-5, atol=1e-5)


def test_local_heads_of_older_versions():
    """local-attention before 1.7.2 turned each token by its own place: those weights need no correction."""
    old = old_language_model(LOCAL)
    x, config = torch.randint(19, (2, 48)), SIZE | LOCAL
    new = weights.load(PerformerLM, config, old.state_dict(), aligned_rotary=True)
    assert not torch.allclose(new(x), old(x), rtol=1e-3)
    for part in old.modules():
        if isinstance(part, original.LocalAttention):
            part.forward = partial(aligned, part)
    assert_close(new(x), old(x), rtol=1e-10, atol=1e-10)


def aligned(part: nn.Module, q: Tensor, k: Tensor, v: Tensor, input_mask: None = None) -> Tensor:
    """Their local attention, the definition: tokens turned by their places, buckets and those beside them."""
    n, d = q.shape[-2:]
    angles = torch.arange(n).double()[:, None] * part.rel_pos.inv_freq
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q, k = (x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin for x in (q, k))
    bucket = torch.arange(n) // part.window_size
    near = (bucket[:, None] - bucket).abs() <= 1
    return (q @ k.mT / d**0.5).masked_fill(~near, -torch.inf).softmax(-1) @ v


def test_redrawing_goes_on_where_it_was():
    old = original.PerformerLM(**SIZE, feature_redraw_interval=5)
    old.performer.proj_updater.calls_since_last_redraw.fill_(3)
    new = weights.load(PerformerLM, SIZE | {"feature_redraw_interval": 5}, old.state_dict()).train()
    x = torch.randint(19, (2, 48))
    updater = new.performer.proj_updater
    assert updater.calls_since_last_redraw == 3
    new(x), new(x)
    assert updater.calls_since_last_redraw == 5
    new(x)
    assert updater.calls_since_last_redraw == 1


class TestCausalFavor:
    """Theirs looks at later keys, which no weights can bring back."""

    config = SIZE | {"causal": True, "rotary_position_emb": False}

    def test_says_so(self):
        old = original.PerformerLM(**self.config)
        with pytest.warns(UserWarning, match=r"PerformerLM: .* causal FAVOR\+ takes the largest of all keys"):
            weights.load(PerformerLM, self.config, old.state_dict())

    def test_where_nothing_comes_later_it_is_theirs(self):
        """The last token sees all keys: its attention is the same, so a model of one layer has the same last logits."""
        config = self.config | {"depth": 1}
        old = without_epsilon(trained(original.PerformerLM(**config)))
        with pytest.warns(UserWarning):
            new = weights.load(PerformerLM, config, old.state_dict())
        x = torch.randint(19, (2, 48))
        assert_close(new(x)[:, -1], old(x)[:, -1], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(new(x), old(x), rtol=1e-10, atol=1e-10)

    def test_other_kernels_say_nothing(self):
        for options in (RELU, {"no_projection": True}):
            old = original.PerformerLM(**self.config, **options)
            with warnings.catch_warnings(action="error"):
                weights.load(PerformerLM, self.config | options, old.state_dict())
