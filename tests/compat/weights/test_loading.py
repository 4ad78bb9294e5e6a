"""All of a checkpoint, or nothing and the names of what does not fit. Checkpoints here are of random numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn import compat
from linattn.compat import weights
from linattn.compat.fast_transformers import TransformerEncoder
from linattn.compat.linear_attention_transformer import Autopadder, LinearAttentionTransformerLM
from linattn.compat.linformer import Linformer, LinformerLM
from linattn.compat.performer_pytorch import Performer, PerformerLM
from linattn.compat.weights.loading import CONVERSIONS

COMPAT = Path(compat.__file__).parent
ENCODER = {"n_layers": 1, "n_heads": 2, "query_dimensions": 3, "value_dimensions": 4, "feed_forward_dimensions": 5}
LANGUAGE_MODEL = {"num_tokens": 5, "dim": 8, "depth": 1, "max_seq_len": 16, "heads": 2, "dim_head": 4}
LANGUAGE_MODEL |= {"local_attn_window_size": 4}
PERFORMER = {"dim": 8, "depth": 1, "heads": 2, "dim_head": 4, "nb_features": 6}


def checkpoint(constructor: type[nn.Module], config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """What fits: theirs, by the names and shapes that the table expects."""
    conversion = CONVERSIONS[constructor]
    model = constructor(**conversion.arguments(constructor, config))
    ours = model.state_dict()
    shapes = {move.theirs: move.change.shape(ours[move.ours].shape) for move in conversion.moves(model, False)}
    return {name: torch.randn([*shape]).to(dtype) for name, shape in shapes.items() if name is not None}


@pytest.fixture
def encoder() -> dict[str, Tensor]:
    return checkpoint(TransformerEncoder, ENCODER)


def test_every_constructor_says_what_is_missing():
    configs = {TransformerEncoder: ENCODER, LinearAttentionTransformerLM: LANGUAGE_MODEL, Performer: PERFORMER}
    for constructor, config in configs.items():
        whole = checkpoint(constructor, config)
        for name in whole:
            rest = {key: value for key, value in whole.items() if key != name}
            with pytest.raises(ValueError, match=f"missing: {name}"):
                weights.load(constructor, config, rest)


def test_loading_knows_no_package():
    """A package adds its conversions itself, and a file of tests is named after it."""
    packages = {path.parent.name for path in COMPAT.glob("*/weights.py")}
    assert {kind.__module__.split(".")[2] for kind in CONVERSIONS if "compat" in kind.__module__} == packages
    for path in (COMPAT / "weights").glob("*.py"):
        assert not any(f"linattn.compat.{package}" in path.read_text("utf-8") for package in packages)
    for package in packages:
        assert Path(__file__).with_name(f"test_{package}.py").exists(), package


class TestRefused:
    def test_a_tensor_that_nobody_takes(self, encoder):
        encoder["layers.0.attention.u"] = torch.ones(3)
        with pytest.raises(ValueError, match=r"not used: layers\.0\.attention\.u"):
            weights.load(TransformerEncoder, ENCODER, encoder)

    def test_another_shape(self, encoder):
        encoder["layers.0.linear1.weight"] = torch.ones(8, 5)
        expected = r"of another shape: layers\.0\.linear1\.weight is \(8, 5\), expected \(5, 8\)"
        with pytest.raises(ValueError, match=expected):
            weights.load(TransformerEncoder, ENCODER, encoder)

    def test_all_at_once(self, encoder):
        encoder["norm.gain"] = encoder.pop("norm.weight")
        encoder["norm.bias"] = torch.ones(9)
        with pytest.raises(ValueError, match="not the weights of a TransformerEncoder with this config") as error:
            weights.load(TransformerEncoder, ENCODER, encoder)
        assert str(error.value).splitlines()[1:] == [
            "  missing: norm.weight",
            "  not used: norm.gain",
            "  of another shape: norm.bias is (9,), expected (8,)",
        ]

    def test_weights_that_would_stay_new(self):
        """An axis of positions that no table has, say: everything of ours has its line in the tables, so by force."""
        kind = TransformerEncoder
        conversion = CONVERSIONS[kind]
        fewer = conversion._replace(moves=lambda model, aligned: [*conversion.moves(model, aligned)][:-1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(CONVERSIONS, kind, fewer)
            with pytest.raises(ValueError, match=r"not used: norm\.bias\n  new here: norm\.bias"):
                weights.load(kind, ENCODER, checkpoint(kind, ENCODER) | {"norm.bias": torch.ones(8)})

    @pytest.mark.parametrize(
        ("saved", "said"),
        [
            ({"reversible": True}, {}),
            ({"shift_tokens": True}, {}),
            ({}, {"shift_tokens": True}),
            ({"depth": 2}, {}),
            ({"heads": 4}, {}),
            ({"use_axial_pos_emb": False}, {}),
            ({"use_rotary_emb": True}, {}),
            ({"emb_dim": 4}, {}),
            ({"return_embeddings": True}, {}),
            ({"receives_context": True}, {}),
            ({"attend_axially": True, "dim_head": 4}, {}),
            ({}, {"linformer_settings": (4,)}),
        ],
        ids=str,
    )
    def test_another_config(self, saved, said):
        """Where names or shapes tell. What they cannot tell, as causal or the heads' windows, is the config's alone."""
        tensors = checkpoint(LinearAttentionTransformerLM, LANGUAGE_MODEL | saved)
        with pytest.raises(ValueError, match="not the weights of a LinearAttentionTransformerLM with this config"):
            weights.load(LinearAttentionTransformerLM, LANGUAGE_MODEL | said, tensors)

    def test_a_reversible_performer_is_no_sequential_one(self):
        tensors = checkpoint(Performer, PERFORMER | {"reversible": True})
        with pytest.raises(ValueError, match=r"missing: net\.layers\.0\.0\.fn\.fast_attention"):
            weights.load(Performer, PERFORMER, tensors)

    def test_an_empty_checkpoint(self):
        with pytest.raises(ValueError, match=r"missing: .*token_emb\.weight"):
            weights.load(LinearAttentionTransformerLM, LANGUAGE_MODEL, {})

    def test_constructors_without_old_weights(self):
        with pytest.raises(ValueError, match=r"LinearAttentionTransformerLM, .* but Autopadder came"):
            weights.load(Autopadder, {}, {})

    @pytest.mark.usefixtures("unchecked")
    def test_what_is_no_config_and_no_state_dict(self, encoder):
        for name, arguments in (
            ("state_dict", (TransformerEncoder, ENCODER, TransformerEncoder(**ENCODER))),
            ("state_dict", (TransformerEncoder, ENCODER, None)),
            ("config", (TransformerEncoder, None, encoder)),
        ):
            with pytest.raises(ValueError, match=f"{name} must be a dict, but is a "):
                weights.load(*arguments)
        with pytest.raises(ValueError, match="but a TransformerEncoder came"):
            weights.load(TransformerEncoder(**ENCODER), ENCODER, encoder)

    def test_a_misspelt_argument_is_named_as_the_constructor_names_it(self):
        for constructor, config in ((Performer, PERFORMER), (LinearAttentionTransformerLM, LANGUAGE_MODEL)):
            message = rf"{constructor.__name__} takes no argument 'dept' \(did you mean 'depth'"
            with pytest.raises(TypeError, match=message):
                weights.load(constructor, config | {"dept": 2}, {})

    @pytest.mark.usefixtures("unchecked")
    def test_settings_are_checked_as_the_constructor_checks_them(self):
        with pytest.raises(ValueError, match=r"linformer_settings must be LinformerSettings\(k\), but is 4"):
            weights.load(LinearAttentionTransformerLM, LANGUAGE_MODEL | {"linformer_settings": 4}, {})

    def test_unknown_arguments(self, encoder):
        with pytest.raises(TypeError, match="layers"):
            weights.load(TransformerEncoder, ENCODER | {"layers": 2}, encoder)


class TestLeftOut:
    def test_performers_second_copy_and_tables(self):
        config = PERFORMER | {"num_tokens": 5, "max_seq_len": 16}
        tensors = checkpoint(PerformerLM, config)
        new = weights.load(PerformerLM, config, tensors)
        doubled = {f"performer.proj_updater.instance.{name}": tensor for name, tensor in tensors.items()}
        tables = {"pos_emb.emb": torch.ones(16, 8), "layer_pos_emb.emb": torch.ones(16, 4)}
        tables["performer.net.layers.0.0.fn.local_attn.rel_pos.inv_freq"] = torch.ones(2)
        again = weights.load(PerformerLM, config, tensors | doubled | tables)
        x = torch.randint(5, (1, 9))
        assert_close(again(x), new(x), rtol=0, atol=0)

    def test_matrices_that_nobody_multiplies_by(self):
        config = PERFORMER | {"no_projection": True}
        tensors = checkpoint(Performer, config)
        name = "net.layers.0.0.fn.fast_attention.projection_matrix"
        assert name not in tensors
        weights.load(Performer, config, tensors | {name: torch.ones(6, 4)})


class TestTheModel:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_has_the_dtype_of_the_weights(self, dtype):
        new = weights.load(TransformerEncoder, ENCODER, checkpoint(TransformerEncoder, ENCODER, dtype))
        assert {p.dtype for p in new.parameters()} == {dtype} and not new.training

    def test_leaves_the_checkpoint_alone(self, encoder):
        kept = {name: tensor.clone() for name, tensor in encoder.items()}
        new = weights.load(TransformerEncoder, ENCODER, encoder)
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.zero_()
        assert all(torch.equal(encoder[name], tensor) for name, tensor in kept.items())

    def test_trains(self):
        config = {"num_tokens": 5, "dim": 8, "seq_len": 12, "depth": 1, "k": 3, "heads": 2, "share_kv": True}
        new = weights.load(LinformerLM, config, checkpoint(LinformerLM, config)).train()
        new(torch.randint(5, (2, 12))).square().sum().backward()
        assert all(parameter.grad is not None for parameter in new.parameters())

    def test_an_ungated_feed_forward_is_a_gate_that_is_one(self):
        """`ff_glu` did nothing after self attention in linear-attention-transformer."""
        tensors = checkpoint(LinearAttentionTransformerLM, LANGUAGE_MODEL)
        x = torch.randint(5, (2, 12))
        plain = weights.load(LinearAttentionTransformerLM, LANGUAGE_MODEL, tensors)
        gated = weights.load(LinearAttentionTransformerLM, LANGUAGE_MODEL | {"ff_glu": True}, tensors)
        assert_close(gated(x), plain(x))
        whole = LinearAttentionTransformerLM(**LANGUAGE_MODEL, ff_glu=True)
        whole.load_state_dict(gated.state_dict())

    def test_in_wrappers_of_training(self):
        config = {"dim": 8, "seq_len": 12, "depth": 1, "k": 3, "heads": 2}
        tensors, x = checkpoint(Linformer, config), torch.randn(1, 12, 8)
        new = weights.load(Linformer, config, tensors)
        for prefix in ("module.", "_orig_mod.", "net.", "module._orig_mod.net."):
            wrapped = {prefix + name: tensor for name, tensor in tensors.items()}
            assert torch.equal(weights.load(Linformer, config, wrapped)(x), new(x))
