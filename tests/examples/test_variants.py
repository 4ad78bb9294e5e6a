"""A variant of a model differs from it in one thing, and a variant that changes nothing is refused."""

import math
from dataclasses import asdict, replace

import pytest
import torch

from examples.learning import run, variants
from linattn import LanguageModel
from linattn.console.muon import language_model_groups
from linattn.nn.gates import BoundedDecay, ChannelDecay, HeadDecay, SigmoidDecay

CODE = run.TASKS["bytes256"].methods
DECAYS = HeadDecay, ChannelDecay, SigmoidDecay, BoundedDecay


def method_of(name):
    """Return a method that the variant changes."""
    kind = "gla" if name.startswith("decays") else "rwkv7" if name == "unit_keys" else "gated_delta"
    return f"{kind}+silu4"


def pair(method, name):
    """Return a model and its variant, from one seed."""
    models = []
    for make in (LanguageModel, variants.VARIANTS[name].model):
        torch.manual_seed(0)
        models.append(make(CODE[method]))
    return models


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_a_step_of_every_variant(tmp_path, monkeypatch, name):
    monkeypatch.setattr("examples.learning.library.split", lambda text=None: (torch.arange(8_192) % 251,) * 2)
    monkeypatch.setattr("examples.learning.library.BATCH", 256)
    monkeypatch.setattr("examples.learning.library.TEST", 256)
    method, out = method_of(name), tmp_path / "runs.jsonl"
    threads = torch.get_num_threads()
    arguments = ["--task", "bytes256", "--method", method, "--steps", "1", "--out", str(out)]
    run.main(arguments)
    run.main([*arguments, "--variant", name])
    torch.set_num_threads(threads)
    plain, changed = run.read(out)
    assert "variant" not in plain and changed["variant"] == name and changed["method"] == method
    assert changed["curve"][0]["loss"] != plain["curve"][0]["loss"]


@pytest.mark.parametrize("name", [name for name, variant in variants.VARIANTS.items() if variant.options])
def test_options_are_those_of_the_configuration(name):
    variant, plain = variants.VARIANTS[name], CODE[method_of(name)]
    options, model = variant.options, variant.model(plain)
    assert asdict(model.config) == asdict(replace(plain, **options))
    assert options.items() <= asdict(model.config).items()


@pytest.mark.parametrize("last", (10, 100, 1_000))
@pytest.mark.parametrize("method", ("gla", "ssd", "gated_delta", "kda", "rwkv7"))
def test_heads_or_channels_forget_within_these_numbers_of_tokens(method, last):
    _, model = pair(f"{method}+silu4", f"decays_1000_{last}")
    gates = [module for module in model.modules() if isinstance(module, DECAYS)]
    assert len(gates) == 4
    for gate in gates:
        # (heads) or (heads, channels)
        tokens = -1 / gate(torch.zeros(1, 1, 128))[0, :, 0].double()
        expected = torch.logspace(3, math.log10(last), tokens.shape[-1], dtype=torch.float64)
        torch.testing.assert_close(tokens, expected.expand_as(tokens), rtol=1e-4, atol=0)


@pytest.mark.parametrize("task", run.TASKS.values(), ids=run.TASKS)
def test_models_of_every_task_have_variants(task):
    """However few tokens they know."""
    config = min(task.methods.values(), key=lambda config: config.dim)
    assert variants.VARIANTS["matrices*3"].model(config).config == config


def test_layers_begin_as_nothing():
    _, model = pair("hybrid+silu4", "zero_outputs")
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model.logits(model.norm(model.embedding(tokens)))
    torch.testing.assert_close(model(tokens), expected)


def test_the_matrices_of_layers_and_nothing_else_are_three_times_as_large():
    for method in ("softmax+silu4", "hybrid+silu4"):
        plain, large = pair(method, "matrices*3")
        hidden = {id(weight) for weight in language_model_groups(large, large.get_stack())[0]["params"]}
        for before, after in zip(plain.parameters(), large.parameters(), strict=True):
            torch.testing.assert_close(after, before * (3 if id(after) in hidden else 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("method", "name"), (("softmax", "decays_1000_10"), ("gated_delta", "unit_keys")))
def test_a_variant_that_changes_nothing_is_refused(method, name):
    with pytest.raises(ValueError, match=f"changes nothing in a model with {method}"):
        variants.VARIANTS[name].model(CODE[f"{method}+silu4"])
