"""Transfer, choice of layers and fine-tuning: losses fall, kept layers stay, a run that was cut off equals one that was
not."""

import copy
import importlib
import io
import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from linattn.console.muon import Muon
from linattn.linearize import (
    Budget,
    Rates,
    Training,
    choose_layers,
    convert,
    divergence,
    fine_tune,
    layer_errors,
    linearized_layers,
    plan,
    restore_layers,
    scores,
    transfer,
)
from linattn.linearize.distance import LayerOutputs, compare_layers, relative_error
from linattn.linearize.predictions import main_output
from linattn.linearize.stages import RATES
from linattn.linearize.trained_weights import without_dropout
from linattn.models.loss import NO_LABEL
from tests.integrations.transformers.stock_attention.families import (
    AUDIO,
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    EXPERTS,
    GROUPED,
    IMAGES,
    every,
    make,
)
from tests.integrations.transformers.stock_attention.test_attention import logits, tokens

from .test_conversion import batch_of

SOME = {
    "llama": DECODERS["llama"],
    "bert": ENCODERS["bert"],
    "vit": IMAGES["vit"],
    "bart": ENCODER_DECODERS["bart"],
    **EXPERTS,
}
STAGES = {"transfer": transfer, "fine_tune": fine_tune}
every_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)


def start(family: Any, method: str = "hedgehog", **options: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    model = make(family, torch.float32)
    batches = [{name: x.float() if x.is_floating_point() else x for name, x in batch_of(model).items()} for _ in "ab"]
    return convert(model, plan(model, batches[0], method=method, **options), batches), batches


@torch.no_grad()
def disturb(model: Any) -> None:
    """Bring the model far from its teacher, as random models differ little without softmax."""
    for module in linearized_layers(model).values():
        for weight in module.parameters():
            weight += 0.3 * torch.randn_like(weight)


@every(SOME)
@every_stage
def test_the_model_comes_nearer_to_its_teacher(family, stage):
    # a window as long as the rows would be softmax itself
    conversion, batches = start(family, window=0)
    model, teacher = conversion.model, conversion.teacher
    if stage is fine_tune:
        disturb(model)
    before = copy.deepcopy(teacher.state_dict())
    measure = layer_errors if stage is transfer else divergence
    first, training = measure(model, teacher, batches), stage(model, teacher, batches, Budget(steps=12))
    assert training.steps == 12
    assert training.losses[-1] < training.losses[0]
    last = measure(model, teacher, batches)
    if stage is transfer:
        assert all(last[index] < first[index] for index in first)
    else:
        assert last < first
    assert_close(teacher.state_dict(), before, rtol=0, atol=0)
    assert all(weight.requires_grad for weight in model.parameters())


def test_transfer_changes_linear_layers_only():
    conversion, batches = start(DECODERS["llama"], keep=(0,))
    before = copy.deepcopy(conversion.model.state_dict())
    transfer(conversion.model, conversion.teacher, batches, Budget(steps=2))
    after, (name,) = conversion.model.state_dict(), linearized_layers(conversion.model)
    for key in before:
        assert torch.equal(after[key], before[key]) != key.startswith(name), key


def test_the_error_is_a_share_of_the_variance():
    """Zero for the target, one for its mean, whatever is added to both; absent tokens do not count."""
    target, offset = torch.randn(2, 50, 3, dtype=torch.float64), torch.tensor([5.0, -3.0, 70.0])
    spread = target - target.mean((0, 1))
    # one variance for all channels, as channels of one output share a scale
    assert_close(relative_error(target + offset - spread, target + offset), torch.ones((), dtype=torch.float64))
    assert_close(relative_error(target + offset + 0.5 * spread, target + offset), torch.tensor(0.25).double())
    present = torch.rand(2, 50) < 0.7
    hidden = torch.where(present.unsqueeze(-1), target, 1e6)
    expected = relative_error(torch.zeros_like(target[present]), target[present])
    assert_close(relative_error(torch.zeros_like(target), hidden, present), expected)


def test_half_of_a_layers_distance_is_at_the_tokens_that_labels_ask_about():
    conversion, (batch, _) = start(DECODERS["llama"], window=0)
    model, teacher = conversion.model, conversion.teacher
    disturb(model)
    labels = torch.full_like(batch["input_ids"], NO_LABEL)
    labels[0, 3], labels[1, 6] = 1, 2
    # a decoder is asked about a token at the one before it
    asked = torch.zeros_like(labels, dtype=torch.bool)
    asked[0, 2] = asked[1, 5] = True
    expected = []
    for outputs in layer_outputs(model, teacher, batch).values():
        plain, there = relative_error(*outputs), relative_error(outputs.y[asked], outputs.target[asked])
        assert abs(plain - there) > 1e-3
        expected.append(torch.stack([plain, (plain + there) / 2]))
    without, half = torch.stack(expected).mean(0)
    for asks, loss in ((None, without), (torch.full_like(labels, NO_LABEL), without), (labels, half)):
        conversion, (batch, _) = start(DECODERS["llama"], window=0)
        disturb(conversion.model)
        batch = batch if asks is None else {**batch, "labels": asks}
        training = transfer(conversion.model, conversion.teacher, [batch], Budget(steps=1))
        assert_close(torch.tensor(training.losses[0]), loss)


def layer_outputs(model: Any, teacher: Any, batch: Any) -> dict[int, LayerOutputs]:
    outputs: dict[int, LayerOutputs] = {}
    compare_layers(model, teacher, batch, outputs.__setitem__)
    return outputs


def _zero(x: torch.Tensor) -> None:
    x.zero_()


def test_outputs_that_the_teacher_changes_later_are_compared_as_they_were():
    conversion, batches = start(DECODERS["llama"], window=0)
    disturb(conversion.model)
    teacher, kept = conversion.teacher, []
    expected = layer_errors(conversion.model, teacher, batches)
    for name in linearized_layers(conversion.model):
        attention = teacher.get_submodule(name)
        attention.register_forward_hook(lambda module, args, output: kept.append(output[0]))
        parent = teacher.get_submodule(name.rpartition(".")[0])
        parent.register_forward_hook(lambda module, args, output: _zero(kept.pop()))
    assert layer_errors(conversion.model, teacher, batches) == expected


def test_labels_of_rows_ask_about_no_token():
    conversion, (batch, _) = start(("BertForSequenceClassification", ENCODERS["bert"][1]))
    outputs = layer_outputs(conversion.model, conversion.teacher, batch).values()
    expected = torch.stack([relative_error(*each) for each in outputs]).mean()
    labeled = {**batch, "labels": torch.zeros(len(batch["input_ids"]), dtype=torch.int64)}
    training = transfer(conversion.model, conversion.teacher, [labeled], Budget(steps=1))
    assert_close(torch.tensor(training.losses[0]), expected.detach())


def test_a_restored_layer_is_the_teachers():
    conversion, batches = start(DECODERS["gpt2"], "taylor2", key_dim=4)
    model, teacher = conversion.model, conversion.teacher
    transfer(model, teacher, batches, Budget(steps=3))
    before = divergence(model, teacher, batches)
    choice = choose_layers(model, teacher, batches, 1)
    # the model is what it was
    assert divergence(model, teacher, batches) == before
    assert set(choice.restored) == {0, 1}
    assert choice.restored[choice.kept[0]] == min(choice.restored.values())
    assert choice.before == before
    restore_layers(model, teacher, choice.kept)
    assert divergence(model, teacher, batches) == choice.restored[choice.kept[0]]
    restore_layers(model, teacher, {0, 1} - set(choice.kept))
    assert_close(model.state_dict(), teacher.state_dict(), rtol=0, atol=0)


class Interrupted(Exception):
    pass


@every_stage
def test_an_interrupted_training_goes_on(stage, tmp_path):
    """Its validations go on, too, and do not change the weights."""
    weights, seen = [], []
    for folder in (None, tmp_path):
        conversion, batches = start(DECODERS["llama"])
        budget = Budget(steps=6, folder=folder, save_every=2)
        if folder:
            steps = itertools.count(1)

            def fail(progress: Any, steps: Any = steps) -> None:
                if next(steps) == 5:
                    raise Interrupted

            with pytest.raises(Interrupted):
                cut_off = validated(conversion, batches, replace(budget, report=fail))
                stage(conversion.model, conversion.teacher, batches, cut_off)
            conversion, batches = start(DECODERS["llama"])
            budget = validated(conversion, batches, replace(budget, report=seen.append))
        training = stage(conversion.model, conversion.teacher, batches, budget)
        assert training.steps == 6
        weights.append(conversion.model.state_dict())
    assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert list(training.validations) == [2, 4, 6]
    assert training.validations[6] == {"distance": divergence(conversion.model, conversion.teacher, batches)}
    # the last checkpoint was after four steps
    assert [(each.step, each.figures) for each in seen] == [(5, {}), (6, training.validations[6])]


@pytest.mark.parametrize(
    ("stage", "options", "missing"),
    [
        (fine_tune, {}, r"lm_head\.weight \(37, 32\)"),
        (transfer, {"keep": (0,)}, r"model\.layers\.0\.self_attn\.k_proj\.weight \(16, 32\)"),
        (transfer, {"key_dim": 4}, r"model\.layers\.0\..*\.feature_map\.key_linear\.weight \(2, 4, 4\)"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_before_a_weight_changes(stage, options, missing, tmp_path):
    conversion, batches = start(DECODERS["llama"])
    budget = Budget(steps=1, folder=tmp_path)
    transfer(conversion.model, conversion.teacher, batches, budget)
    conversion, batches = start(DECODERS["llama"], **options)
    before = copy.deepcopy(conversion.model.state_dict())
    message = rf"{re.escape(str(tmp_path))} has the checkpoint of a training with other weights, such as {missing}:"
    with pytest.raises(ValueError, match=message):
        stage(conversion.model, conversion.teacher, batches, budget)
    assert_close(conversion.model.state_dict(), before, rtol=0, atol=0)


def test_figures_of_any_package_are_in_the_checkpoint(tmp_path):
    conversion, batches = start(DECODERS["llama"])
    budget = Budget(steps=1, folder=tmp_path, validate=lambda model: {"a": np.float64(0.5), "b": torch.tensor(2.0)})
    for steps in (1, 2):
        training = transfer(conversion.model, conversion.teacher, batches, replace(budget, steps=steps))
        assert training.validations[steps] == training.validations[1] == {"a": 0.5, "b": 2.0}


@pytest.mark.parametrize("lora", [None, 2])
def test_an_interrupted_training_goes_on_with_the_same_model(lora, tmp_path):
    weights, options = [], {"rates": Rates(1e-2, 1e-2, 1e-2), "lora": lora}
    for folder in (None, tmp_path):
        conversion, batches = start(DECODERS["llama"])
        budget = Budget(steps=6, folder=folder, save_every=2)
        if folder:

            def fail(progress: Any) -> None:
                if progress.step == 5:
                    raise Interrupted

            torch.manual_seed(1)
            with pytest.raises(Interrupted):
                fine_tune(conversion.model, conversion.teacher, batches, replace(budget, report=fail), **options)
        torch.manual_seed(1)
        fine_tune(conversion.model, conversion.teacher, batches, budget, **options)
        weights.append(conversion.model.state_dict())
    assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_a_folder_that_cannot_be_used_is_refused_before_the_training(tmp_path):
    conversion, batches = start(DECODERS["llama"])
    before, file = copy.deepcopy(conversion.model.state_dict()), tmp_path / "checkpoint.pt"
    transfer(conversion.model, conversion.teacher, batches, Budget(steps=1, folder=tmp_path))
    conversion.reset()
    with pytest.raises(FileExistsError, match=re.escape(str(file))):
        transfer(conversion.model, conversion.teacher, batches, Budget(steps=1, folder=file))
    content, other = file.read_bytes(), io.BytesIO()
    torch.save({"losses": []}, other)
    for damaged in (content[: len(content) // 2], b"", b"losses", other.getvalue()):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{re.escape(str(file))} is no checkpoint, or a damaged one"):
            transfer(conversion.model, conversion.teacher, batches, Budget(steps=1, folder=tmp_path))
    assert_close(conversion.model.state_dict(), before, rtol=0, atol=0)


def validated(conversion: Any, batches: Any, budget: Budget) -> Budget:
    return replace(budget, validate=lambda model: {"distance": divergence(model, conversion.teacher, batches)})


@every({"llama": DECODERS["llama"], "gpt2": DECODERS["gpt2"]})
def test_adapters_are_merged(family):
    conversion, batches = start(family)
    disturb(conversion.model)
    model, names = conversion.model, set(conversion.model.state_dict())
    model.get_input_embeddings().requires_grad_(False)
    gradients = {name: weight.requires_grad for name, weight in model.named_parameters()}
    before = divergence(model, conversion.teacher, batches)
    fine_tune(model, conversion.teacher, batches, Budget(steps=8), lora=2)
    assert set(model.state_dict()) == names
    assert divergence(model, conversion.teacher, batches) < before

    def fail(progress: Any) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        fine_tune(model, conversion.teacher, batches, Budget(steps=1, report=fail), lora=2)
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == gradients


def test_a_budget_in_minutes_ends_by_itself():
    conversion, batches = start(DECODERS["llama"])
    seen = []
    training = transfer(conversion.model, conversion.teacher, batches, Budget(minutes=0.01, report=seen.append))
    assert 0.6 <= training.seconds < 5
    assert len(seen) == training.steps > 1
    assert seen[0].steps is None
    assert seen[0].seconds_left > seen[-1].seconds_left == 0


def test_only_labels_are_compared():
    conversion, _ = start(DECODERS["llama"])
    model, teacher = conversion.model.double(), conversion.teacher.double()
    disturb(model)
    ids, labels = tokens(2, 9), torch.full((2, 9), -100)
    labels[0, 4] = labels[1, 7] = 3
    found, expected = (logits(x, input_ids=ids).log_softmax(-1) for x in (model, teacher))
    # the output at a token is about the next one
    each = (expected.exp() * (expected - found)).sum(-1)
    mean = (each[0, 3] + each[1, 6]) / 2
    assert divergence(model, teacher, [{"input_ids": ids, "labels": labels}]) == pytest.approx(mean.item(), rel=1e-4)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    present = (each[0].sum() + each[1, :5].sum()) / 14
    batch = {"input_ids": ids, "attention_mask": mask}
    assert divergence(model, teacher, [batch]) == pytest.approx(present.item(), rel=1e-4)


def test_fine_tuning_follows_the_teacher_and_the_text():
    conversion, batches = start(DECODERS["llama"])
    model, teacher = conversion.model, conversion.teacher
    batch = {**batches[0], "labels": batches[0]["input_ids"]}
    disturb(model)
    expected = (divergence(model, teacher, [batch]) + model(**batch).loss.item()) / 2
    assert fine_tune(model, teacher, batches[:1], Budget(steps=1)).losses == (pytest.approx(expected, rel=1e-4),)


# for as many classes as tokens, labels have the shape of the tokens
@pytest.mark.parametrize(
    ("labels", "settings"),
    [
        (torch.randn(4), {"num_labels": 1}),
        (torch.randn(4, 3), {"num_labels": 3, "problem_type": "regression"}),
        (torch.rand(4, 3).round(), {"num_labels": 3, "problem_type": "multi_label_classification"}),
        (torch.rand(4, 3).round(), {"num_labels": 3}),
    ],
    ids=["number", "regression", "multi-label", "multi-label by its labels"],
)
def test_outputs_of_no_distribution_are_compared_by_squared_errors(labels, settings):
    model = make(("BertForSequenceClassification", {**ENCODERS["bert"][1], **settings}), torch.float32)
    batch = {"input_ids": tokens(4, 3), "labels": labels}
    teacher = convert(model, plan(model, batch, method="elu", window=0)).teacher
    errors = torch.stack([relative_error(*each) for each in layer_outputs(model, teacher, batch).values()])
    assert transfer(model, teacher, [batch], Budget(steps=1)).losses == (pytest.approx(errors.mean().item()),)
    disturb(model)
    with torch.no_grad():
        found, target = model(**batch), teacher(**batch).logits.double()
    error = (found.logits - target).square().sum() / (target - target.mean(0)).square().sum()
    assert divergence(model, teacher, [batch]) == pytest.approx(error.item())
    result = scores(model, teacher, [batch])
    assert result.cosine == pytest.approx(F.cosine_similarity(found.logits, target.float()).mean().item())
    assert (result.loss, result.accuracy, result.kl, result.agreement) == 4 * (None,)
    expected = (error + found.loss).item() / 2
    assert fine_tune(model, teacher, [batch], Budget(steps=1)).losses == (pytest.approx(expected),)


def test_several_processes_need_a_group(monkeypatch):
    conversion, batches = start(DECODERS["llama"])
    with pytest.raises(ValueError, match="several processes, but there is one"):
        Budget(steps=1, shard=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="there are 2 processes, but no group of them"):
        transfer(conversion.model, conversion.teacher, batches, Budget(steps=1))


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_are_refused():
    conversion, batches = start(DECODERS["llama"])
    model, teacher = conversion.model, conversion.teacher
    with pytest.raises(ValueError, match="give steps, minutes or both"):
        Budget()
    for steps in (0, -1, 1.5, True, "many"):
        with pytest.raises(ValueError, match=rf"steps must be a whole number.*, but is {steps!r}"):
            Budget(steps=steps)
        with pytest.raises(ValueError, match=rf"save_every must be a whole number.*, but is {steps!r}"):
            Budget(steps=1, save_every=steps)
    for minutes in (0, -1.0, float("nan"), float("inf"), True, "many"):
        with pytest.raises(ValueError, match=f"minutes must be .*, but (is|are) {minutes!r}"):
            Budget(minutes=minutes)
    for rate in (-1e-3, float("nan"), float("inf"), None, "fast"):
        for name in ("stock", "new", "hidden"):
            with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0, but is {rate!r}"):
                Rates(**{"stock": 1e-3, "new": 1e-3, "hidden": 1e-3, name: rate})
    for use in (divergence, layer_errors, lambda *given: choose_layers(*given, 1)):
        with pytest.raises(ValueError, match="at least one batch"):
            use(model, teacher, [])
    stages = [partial(stage, budget=Budget(steps=1)) for stage in STAGES.values()]
    for use in (divergence, layer_errors, scores, *stages):
        for some in (batches[0], iter(batches)):
            with pytest.raises(ValueError, match=r"batches must be a sequence of batches, but are a (dict|list_)"):
                use(model, teacher, some)
    for use in (layer_errors, lambda *given: choose_layers(*given, 1), *stages):
        with pytest.raises(ValueError, match="the model is its own teacher"):
            use(model, model, batches)
    with pytest.raises(ValueError, match="a batch holds the arguments of a call by name"):
        divergence(model, teacher, [batches])
    for stage in STAGES.values():
        with pytest.raises(ValueError, match="at least one batch"):
            stage(model, teacher, [], Budget(steps=1))
    with pytest.raises(ValueError, match="must ask for a prediction"):
        fine_tune(model, teacher, [{"input_ids": tokens(2, 1)}], Budget(steps=1))
    with pytest.raises(ValueError, match=r"layers has \[9\], but the linear layers are \[0, 1\]"):
        restore_layers(model, teacher, (0, 9))
    for layers in (0, None, "01", (True,), (0.0,)):
        with pytest.raises(ValueError, match=rf"layers must be .*, but is {re.escape(repr(layers))}"):
            restore_layers(model, teacher, layers)
    absent = {**batches[0], "attention_mask": torch.zeros_like(batches[0]["input_ids"])}
    for some in ([absent], [batches[0], absent]):
        with pytest.raises(ValueError, match="the batches of an update must have a present token, but have none"):
            transfer(model, teacher, some, Budget(steps=2))
    with pytest.raises(ValueError, match="train the model in float32 or bfloat16"):
        transfer(copy.deepcopy(model).half(), teacher, batches, Budget(steps=1))
    with pytest.raises(ValueError, match="count must be from 0 to 2, the linear layers, but is 3"):
        choose_layers(model, teacher, batches, 3)
    conversion.undo()
    with pytest.raises(ValueError, match="no layer of this LlamaForCausalLM is linear"):
        transfer(model, teacher, batches, Budget(steps=1))


@pytest.mark.parametrize("name", ["llama", "opt", "bart", "gpt2"])
def test_training_has_no_dropout(name, monkeypatch):
    rates: list[float] = []

    def note(x, p=0.5, training=True, inplace=False):
        rates.append(p * training)
        return x

    changes = {"attention_dropout": 0.5} if name == "llama" else {}
    model = make({**DECODERS, **ENCODER_DECODERS}[name], torch.float32, **changes).train()
    model.lm_head.eval()
    conversion = convert(model, plan(model, batch_of(model), method="elu"))
    monkeypatch.setattr(F, "dropout", note)
    fine_tune(model, conversion.teacher, [batch_of(model)], Budget(steps=1))
    assert rates == len(rates) * [0]
    # all is as it was
    assert [module for module in model.modules() if not module.training] == [model.lm_head]
    model(**batch_of(model))
    assert max(rates) > 0


SOUND = {**AUDIO["wav2vec2"][1], **dict.fromkeys(("layerdrop", "mask_time_prob"), 0.0), "mask_time_length": 2}
PATCHES = ("DINOv3ViTModel", {**IMAGES["vit"][1], "image_size": 16})
EXPERTS_OF_TWO = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 2}
NOISE = {
    "layerdrop": ("Wav2Vec2Model", {**SOUND, "layerdrop": 0.5}),
    "masked frames": ("Wav2Vec2Model", {**SOUND, "mask_time_prob": 0.5}),
    "masked features": ("Wav2Vec2Model", {**SOUND, "mask_feature_prob": 0.5, "mask_feature_length": 2}),
    "router": ("MixtralForCausalLM", {**EXPERTS_OF_TWO, "router_jitter_noise": 0.3}),
    "scaled positions": ("DINOv3ViTModel", {**PATCHES[1], "pos_embed_rescale": 2.0}),
    "shifted positions": ("DINOv3ViTModel", {**PATCHES[1], "pos_embed_rescale": None, "pos_embed_shift": 0.5}),
}


@every(NOISE)
def test_training_has_no_noise(family):
    model = make(family, torch.float32)
    inputs = {
        "input_ids": tokens(2, 16),
        "input_values": torch.randn(2, 800),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    batch = {model.main_input_name: inputs[model.main_input_name]}
    expected, settings = main_output(model(**batch)), model.config.to_dict()
    model.train()

    def is_noisy() -> bool:
        return any(not torch.allclose(main_output(model(**batch)), expected, atol=1e-5) for _ in range(8))

    assert is_noisy()
    with without_dropout(model):
        assert not is_noisy()
    assert is_noisy()
    assert model.config.to_dict() == settings


@pytest.mark.parametrize(
    ("layer", "dims"),
    [
        (nn.Dropout, 2),
        (nn.Dropout1d, 3),
        (nn.Dropout2d, 4),
        (nn.Dropout3d, 5),
        (nn.AlphaDropout, 2),
        (nn.FeatureAlphaDropout, 3),
    ],
)
def test_no_layer_of_dropout_is_random_in_training(layer, dims):
    model, x = layer(0.5), torch.rand(2, 9, 3, 3, 3)[(..., *(5 - dims) * (0,))]
    with without_dropout(model):
        assert_close(model(x), x)
    assert (model(x) != x).any()


def test_a_loss_that_is_not_finite_is_an_error():
    conversion, batches = start(DECODERS["llama"])
    with pytest.raises(ValueError, match="the loss is not finite at step"):
        transfer(conversion.model, conversion.teacher, batches, Budget(steps=9), rates=Rates(1e30, 1e30, 1e30))


@pytest.mark.parametrize(("size", "is_near"), [(1e-2, True), (1e3, False)])
def test_the_steps_of_fine_tuning_are_as_long_as_the_way(size, is_near, monkeypatch):
    model, given = make(DECODERS["llama"]), []
    with torch.no_grad():
        model.lm_head.weight.mul_(size)
    batches = [{"input_ids": tokens()} for _ in range(2)]
    conversion = convert(model, plan(model, method="elu", window=0, convolution=0, decay=False))

    def note(model, objective, batches, groups, budget, full_steps):
        given.extend(group["lr"] for group in groups)
        return Training((), 0.0)

    # the package has a function of the module's name
    module = importlib.import_module("linattn.linearize.stages")
    monkeypatch.setattr(module, "train", note)
    fine_tune(model, conversion.teacher, batches, Budget(steps=1))
    fine_tune(model, conversion.teacher, batches, Budget(steps=1), rates=Rates(0.5, 0.6, 0.7))
    distance = divergence(model, conversion.teacher, batches)
    length = 1.5 * distance**0.5
    assert (length < 1) == is_near
    # hidden matrices have steps in proportion to the distance
    found = [min(1, length) * RATES.stock, min(1, distance) * RATES.hidden]
    assert given == [pytest.approx(rate) for rate in found] + [0.5, 0.7]


@pytest.mark.parametrize(("stage", "options"), [(transfer, {}), (fine_tune, {}), (fine_tune, {"lora": 2})])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_stock_matrices_of_linear_layers_in_blocks_take_orthogonal_steps(name, stage, options, monkeypatch):
    """Not the embeddings, the output, new weights and adapters."""
    model, orthogonal, others = make({**DECODERS, **ENCODER_DECODERS}[name]), set(), set()
    batches = [batch_of(model)]
    conversion = convert(model, plan(model, batches[0], method="elu"), batches)

    def note(model, objective, batches, groups, budget, full_steps):
        names = {id(weight): name for name, weight in model.named_parameters()}
        for group in groups:
            names_of = orthogonal if group.get("orthogonal") else others
            names_of.update(names[id(weight)] for weight in group["params"])
        return Training((), 0.0)

    monkeypatch.setattr(importlib.import_module("linattn.linearize.stages"), "train", note)
    linear = {f"{name}.weight" for name, x in model.named_modules() if isinstance(x, (torch.nn.Linear, Conv1D))}
    stage(model, conversion.teacher, batches, Budget(steps=1), **options)
    own = {name for name in linear if re.search(r"[.]\d+[.]", name) and "linear_attention" not in name}
    if stage is transfer:
        assert orthogonal == {name for name in own if "attn" in name} and len(orthogonal) < len(own)
    elif options:
        assert not orthogonal and sum("lora_" in name for name in others) == 2 * len(own)
    else:
        assert orthogonal == own and len(own) < len(linear)
        assert orthogonal | others == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(("stage", "steps"), [(transfer, 20), (fine_tune, 80)])
def test_few_steps_and_large_models_have_lower_rates(stage, steps, monkeypatch):
    """In proportion to the steps, and inversely to the size; rates that are given stay."""
    module, stages = (importlib.import_module(f"linattn.linearize.{name}") for name in ("training", "stages"))

    def highest(number: int, width: int = 32, **options: Any) -> float:
        seen: list[float] = []
        monkeypatch.setattr(
            module,
            "clip_grad_norm_",
            lambda *_: seen.append(
                max(group["lr"] for group in optimizers[-1].param_groups if not group.get("orthogonal"))
            ),
        )
        family = ("LlamaForCausalLM", {**DECODERS["llama"][1], "hidden_size": width})
        conversion, batches = start(family, "elu", window=0)
        # a distance of one
        monkeypatch.setattr(stages, "sum_over_processes", lambda *_: [1, 1])
        with torch.no_grad():
            stage(conversion.model, conversion.teacher, batches, Budget(steps=number), **options)
        return max(seen)

    optimizers: list[Any] = []

    def noted(*args: Any, **options: Any) -> Muon:
        optimizers.append(Muon(*args, **options))
        return optimizers[-1]

    monkeypatch.setattr(module, "Muon", noted)
    monkeypatch.setattr(module, "_gradients", lambda *_: 1.0)
    full = highest(steps)
    assert full == pytest.approx(RATES.new, rel=0.01) == highest(3 * steps)
    assert highest(steps // 4) == pytest.approx(full / 4, rel=0.05)
    assert highest(steps, width=512) == pytest.approx(full / 4)
    assert highest(4, rates=Rates(0.1, 0.1, 0.1)) == pytest.approx(highest(steps, rates=Rates(0.1, 0.1, 0.1)), rel=0.2)
