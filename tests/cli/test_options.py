"""Every option of `linattn train` has an effect; and what does not fit together is told in one line."""

import argparse
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from linattn.attention.named import named_attention
from linattn.cli.main import main, make_parser
from linattn.cli.options import GATED_DEFAULTS, TrainOptions, flag, given_options, new_options, recorded_options
from linattn.cli.run_folder import open_run
from linattn.cli.training import training_arguments
from linattn.models import PRESETS, LanguageModel, LanguageModelConfig
from tests.cli.conftest import SHORT, TINY
from tests.models.causal import NAMES

FOUR_STEPS = (*TINY, *SHORT, "--steps", "4")

CONFIGURED = {
    "dim": ("24", 24),
    "depth": ("2", 2),
    "num_heads": ("4", 4),
    "num_key_heads": ("1", 1),
    "head_dim": ("4", 4),
    "key_dim": ("6", 6),
    "attention": ("softmax", "softmax"),
    "window": ("3", 3),
    "rotary": ("none", None),
    "convolution": ("0", 0),
    "convolution_on": ("projections", "projections"),
    "induction": (("--convolution-on", "projections"), True),
    "writes": (("2", "--attention", "delta"), 2),
    "beta_limit": (("2", "--attention", "delta"), 2.0),
    "unit_keys": ((), True),
    "value_skip": ((), True),
    "head_norm": ((), True),
    "head_norm_eps": (("0.001", "--head-norm"), 1e-3),
    "gate": ((), True),
    "gate_function": (("sigmoid", "--gate"), "sigmoid"),
    "gated_norm": ((), True),
    "feed_forward": ("gelu", "gelu"),
    "mlp_ratio": ("2.5", 2.5),
    "norm": ("layer", "layer"),
    "dropout": ("0.3", 0.3),
}
"""Options of the model that are fields of its configuration, with a value."""

TRAINING = {
    "steps": ("3",),
    "minutes": ("0.0001",),
    "context": ("16",),
    "batch": ("2",),
    "accumulate": ("2",),
    "optimizer": ("adamw",),
    "lr": ("1e-4",),
    "warmup": ("0.9",),
    "weight_decay": ("0.5",),
    "clip": ("0.01",),
    "precision": ("bfloat16",),
    "seed": ("1",),
    "tokenizer": ("TOKENIZER",),
    "include": ("a.*",),
    "exclude": ("a.*",),
    "validation_part": ("0.5",),
    "validation_data": ("TEXT",),
    "positions": ("learned",),
    "dropout": ("0.3",),
}
"""Options that change what is learned."""

ELSEWHERE = {
    "field": "test_resume.py",
    "preset": "test_a_preset_gives_what_is_not_given",
    "tie_embeddings": "test_the_untied_output_has_a_matrix_of_its_own",
    "checkpointing": "test_checkpointing_recomputes",
    "segment": "test_resume.py",
    "carry": "test_carry.py",
    "cpu": "test_a_gpu_is_left_alone",
    "fsdp": "test_sharing.py",
    "sequence_parallel": "test_sharing.py",
    "tensor_parallel": "test_sharing.py",
    "track": "test_trackers.py",
    "evaluate_every": "test_reports_come_as_often_as_asked",
    "evaluate_tokens": "test_validation_takes_as_many_tokens_as_asked",
    "log_every": "test_reports_come_as_often_as_asked",
    "save_every": "test_reports_come_as_often_as_asked",
    "keep": "test_reports_come_as_often_as_asked",
}


def test_every_option_is_tested():
    assert {each.name for each in dataclasses.fields(TrainOptions)} == {*CONFIGURED, *TRAINING, *ELSEWHERE}


def test_every_field_of_the_models_configuration_is_an_option():
    """Under its own name; the vocabulary is the data's, the longest length the context, and no encoder predicts."""
    fields = {each.name for each in dataclasses.fields(LanguageModelConfig)} - {"vocab_size", "max_length", "causal"}
    assert fields <= {each.name for each in dataclasses.fields(TrainOptions)}


def train(text: Path, run: Path, *options: str) -> bytes:
    """The weights."""
    assert main(["train", str(text), "--out", str(run), *FOUR_STEPS, *options]) == 0
    return (run / "model.safetensors").read_bytes()


def records(run: Path, name: str) -> list[dict]:
    return [record for record in open_run(run).records() if name in record]


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("options") / "plain"
    train(text, run)
    return run


def test_the_same_options_make_the_same_weights(plain, text, tmp_path):
    assert train(text, tmp_path / "run") == (plain / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", CONFIGURED)
def test_options_of_the_model_reach_it(text, tmp_path, monkeypatch, name):
    models = []
    monkeypatch.setattr("linattn.cli.training._train", lambda run, model, *_: models.append(model.model))
    given, expected = CONFIGURED[name]
    value = [given] if isinstance(given, str) else given
    # a mixture's heads could not share one key head
    options = ("--attention", "elu", flag(name), *value, "--steps", "1")
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *FOUR_STEPS, *options]) == 0
    (model,) = models
    assert getattr(model.config, name) == expected


def test_each_layer_may_have_an_attention_of_its_own(text, tmp_path):
    train(text, tmp_path / "run", "--attention", "elu,softmax", "--depth", "2", "--steps", "1")
    assert LanguageModel.load(tmp_path / "run").config.attention == ("elu", "softmax")


def test_the_default_is_three_layers_of_the_gated_delta_rule_and_one_of_windows():
    """With SiLUs and a norm per head, without positions; it is cut off at any depth."""
    for depth in range(1, 10):
        config = new_options({"depth": depth}).language_model(9)
        assert config.layers == tuple("local" if layer % 4 == 3 else "gated_delta" for layer in range(depth))
        assert (config.convolution, config.convolution_on, config.head_norm) == (4, "projections", True)
        assert config.rotary is None


@pytest.mark.parametrize("name", NAMES)
def test_defaults_depend_on_whether_a_layer_has_gates(name):
    given = {"attention": ("elu", name, "convolution:3"), "depth": 3}
    config = new_options(given).language_model(9)
    inner = named_attention(name, num_heads=2, head_dim=8, causal=True)
    expected = ("projections", True, True, None) if inner.needs else ("inputs", False, False, 10_000.0)
    assert (config.convolution_on, config.induction, config.head_norm, config.rotary) == expected
    # what is given wins
    own = new_options({**given, "convolution_on": "inputs", "head_norm": False, "rotary": 500.0}).language_model(9)
    assert (own.convolution_on, own.induction, own.head_norm, own.rotary) == ("inputs", False, False, 500.0)
    assert not new_options({**given, "induction": False}).induction


@pytest.mark.parametrize(
    "given", [{"num_key_heads": 2}, {"writes": 2}, {"convolution": 1}, {"convolution_on": "inputs"}]
)
def test_where_no_key_can_be_the_query_before_no_layer_begins_so(given):
    assert not new_options(given).language_model(9).induction
    with pytest.raises(ValueError, match="induction needs"):
        new_options({**given, "induction": True}).language_model(9)
    assert new_options({"num_key_heads": 4, "num_heads": 4}).language_model(9).induction


@pytest.mark.parametrize("attention", [("softmax",), ("softmax",) * 2, ("gated_delta", "local"), ("gla",)])
def test_without_a_convolution_no_default_needs_one(attention):
    given = {"attention": attention, "depth": 2}
    config, without = (new_options({**given, "convolution": width}).language_model(9) for width in (4, 0))
    assert (config.convolution_on, config.induction) == ("projections", True)
    assert without == dataclasses.replace(config, convolution=0, convolution_on="inputs", induction=False)


def test_softmax_alone_begins_as_induction_heads():
    for attention in (("elu",), ("local",), ("elu", "softmax")):
        assert not new_options({"attention": attention}).induction
    config = new_options({"attention": ("softmax",)}).language_model(9)
    assert (config.head_norm, config.rotary) == (False, 10_000.0)


@pytest.mark.parametrize("name", TRAINING)
def test_options_of_the_training_change_what_is_learned(plain, text, tokenizer, tmp_path, name):
    files = {"TOKENIZER": str(tokenizer), "TEXT": str(shutil.copy(text / "b.txt", tmp_path))}
    run = tmp_path / "run"
    weights = train(text, run, flag(name), *(files.get(value, value) for value in TRAINING[name]))
    assert weights != (plain / "model.safetensors").read_bytes()
    assert json.loads((run / "run.json").read_text())["options"][name] != getattr(TrainOptions(), name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_what_is_not_given(name):
    given = {"preset": name, "dim": 32, "depth": 5, "norm": "layer", "context": 77}
    options = new_options(given)
    sizes = {field: given[field] for field in ("dim", "depth", "norm")}
    assert options.language_model(9) == LanguageModelConfig.preset(name, vocab_size=9, **sizes)
    assert options.context == 77 and recorded_options(dataclasses.asdict(options)) == options


@pytest.mark.parametrize("given", [{"convolution": 0}, {"gate": False}, {"feed_forward": "none"}])
def test_a_part_of_a_preset_may_be_left_out(given):
    """What the preset says about this part is left out with it."""
    for name in PRESETS:
        options = new_options({"preset": name, **given})
        assert {field: getattr(options.language_model(9), field) for field in given} == given
    with pytest.raises(ValueError, match="mlp_ratio is of the feed-forward"):
        new_options({"preset": "retnet", "feed_forward": "none", "mlp_ratio": 2.0}).language_model(9)


def test_a_run_of_a_preset(text, tmp_path):
    given = [*SHORT, "--preset", "kimi_linear", "--dim", "16", "--num-heads", "2", "--precision", "float32"]
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *given]) == 0
    config = LanguageModel.load(tmp_path / "run").config
    assert config == LanguageModelConfig.preset("kimi_linear", vocab_size=257, dim=16, num_heads=2)
    assert open_run(tmp_path / "run").description["options"]["preset"] == "kimi_linear"


def test_data_for_validation_are_all_validation(text, tmp_path):
    train(text, tmp_path / "run", "--validation-data", str(text / "b.txt"), "--exclude", "b.txt")
    data = open_run(tmp_path / "run").description["data"]
    assert data["validation"]["bytes"] == (text / "b.txt").stat().st_size
    others = [file for file in text.iterdir() if file.name != "b.txt"]
    assert data["training"]["bytes"] == sum(file.stat().st_size for file in others)


def test_the_untied_output_has_a_matrix_of_its_own(text, tmp_path):
    train(text, tmp_path / "run", "--no-tie-embeddings")
    assert LanguageModel.load(tmp_path / "run").head is not None


def test_checkpointing_recomputes(plain, text, tmp_path, monkeypatch):
    import torch.utils.checkpoint

    calls = []
    original = torch.utils.checkpoint.checkpoint

    def counted(*arguments, **options):
        calls.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", counted)
    assert train(text, tmp_path / "run", "--checkpointing") == (plain / "model.safetensors").read_bytes()
    assert calls


def test_a_gpu_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert training_arguments(TrainOptions(cpu=True), tmp_path).use_cpu
    assert not training_arguments(TrainOptions(), tmp_path).use_cpu


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", None])
def test_bfloat16_is_for_machines_that_have_it(monkeypatch, tmp_path, capability):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {capability: True, "avx2": True})
    assert training_arguments(TrainOptions(cpu=True), tmp_path).bf16 == (capability is not None)
    assert training_arguments(TrainOptions(cpu=True, precision="bfloat16"), tmp_path).bf16
    assert not training_arguments(TrainOptions(cpu=True, precision="float32"), tmp_path).bf16


def test_reports_come_as_often_as_asked(text, tmp_path):
    options = ("--steps", "6", "--log-every", "3", "--evaluate-every", "2", "--save-every", "1", "--keep", "3")
    train(text, tmp_path / "run", *options)
    assert [record["step"] for record in records(tmp_path / "run", "training_bits_per_byte")] == [3, 6]
    assert [record["step"] for record in records(tmp_path / "run", "validation_bits_per_byte")] == [2, 4, 6]
    assert open_run(tmp_path / "run").saved_steps() == [4, 5, 6]


def test_validation_takes_as_many_tokens_as_asked(text, plain, tmp_path):
    weights = train(text, tmp_path / "run", "--evaluate-tokens", "64")
    assert weights == (plain / "model.safetensors").read_bytes()
    (few,), (all_,) = (records(run, "validation_bits_per_byte") for run in (tmp_path / "run", plain))
    assert few["validation_bits_per_byte"] != all_["validation_bits_per_byte"]


def test_options_come_back_from_the_record():
    parser = make_parser()
    given = given_options(
        parser.parse_args(["train", "x", "--out", "y", "--attention", "elu,local", "--include", "*.py"])
    )
    options = TrainOptions(**given)
    assert (options.attention, options.include) == (("elu", "local"), ("*.py",))
    assert recorded_options(json.loads(json.dumps(dataclasses.asdict(options)))) == options


def test_help_says_the_defaults():
    (commands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    text = " ".join(commands.choices["train"].format_help().split())
    for each in dataclasses.fields(TrainOptions):
        assert flag(each.name) in text
        if each.name in GATED_DEFAULTS:
            assert re.search(rf"\(default: {GATED_DEFAULTS[each.name]} if .* else {each.default}\)", text, re.I)
        elif isinstance(each.default, (int, float, str)) and each.default is not False:
            assert f"(default: {each.default})" in text
    assert f"(default: {','.join(new_options({}).attention)})" in text
