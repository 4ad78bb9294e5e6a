"""Classification of sequences and tokens, by decoders and encoders."""

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from linattn.integrations.transformers import LinattnForCausalLM, LinattnModel
from linattn.models import LanguageModel
from linattn.models.storage import CLASSES

from .models import config, every_model, left_padded, make, prompts
from .test_trainer import trainer

ENCODERS = ["elu", "softmax"]
MODELS = [auto for auto in CLASSES if auto != "AutoConfig"]
both = pytest.mark.parametrize("causal", [True, False])


def classifier(auto, *, causal, num_labels=3, name="elu", **options):
    given = config(name, causal=causal)
    given.num_labels = num_labels
    for option, value in options.items():
        setattr(given, option, value)
    return auto.from_config(given).double().eval()


@every_model
def test_the_base_model_gives_what_the_logits_are_made_of(name, tmp_path):
    model, tokens = make(name), prompts()
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(base, LinattnModel)
    output = base(tokens, output_hidden_states=True)
    assert_close(model.model.logits(output.last_hidden_state), model(tokens).logits)
    assert_close(output.hidden_states[-1], output.last_hidden_state)
    again = base(tokens[:, -1:], cache=base(tokens[:, :-1], use_cache=True).cache)
    assert_close(again.last_hidden_state, output.last_hidden_state[:, -1:])


@pytest.mark.parametrize("target", MODELS)
@pytest.mark.parametrize("source", MODELS)
@pytest.mark.parametrize("name", ["elu", "layers"])
def test_weights_that_another_class_lacks_are_those_of_a_new_model(name, source, target, tmp_path):
    """Uninitialised memory is NaN here, see tests/conftest.py."""
    given = config(name)
    given.num_labels = 50
    saved, new = (getattr(transformers, auto).from_config(given) for auto in (source, target))
    saved.save_pretrained(tmp_path)
    kept, loaded = saved.state_dict(), getattr(transformers, target).from_pretrained(tmp_path).state_dict()
    for key, tensor in new.state_dict().items():
        if key in kept:
            assert_close(loaded[key], kept[key], rtol=0, atol=0)
        else:
            assert_close(loaded[key].abs().mean(), tensor.abs().mean(), rtol=0.5, atol=0)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_token_of_an_encoder_sees_those_after_it(name):
    model, tokens = AutoModel.from_config(config(name, causal=False)).double().eval(), prompts()
    changed = tokens.clone()
    changed[:, -1] = 0
    before, after = model(tokens).last_hidden_state, model(changed).last_hidden_state
    assert ((before - after)[:, 0].abs() > 0).any()
    assert model(tokens).cache is None


@both
@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("name", ENCODERS)
def test_padding_changes_nothing(name, auto, causal):
    model = classifier(auto, causal=causal, name=name)
    rows = [[5, 6, 7], [1, 2, 3, 4, 5, 6]]
    tokens, mask = left_padded(rows)
    right, right_mask = tokens.flip(1), mask.flip(1)
    for row, values in enumerate(rows):
        alone = model(torch.tensor([values])).logits[0]
        padded = model(tokens, attention_mask=mask).logits[row]
        found = padded if padded.dim() == 1 else padded[-len(values) :]
        assert_close(found, alone)
        turned = model(torch.tensor([values[::-1]])).logits[0]
        found = model(right, attention_mask=right_mask).logits[row]
        assert_close(found if found.dim() == 1 else found[: len(values)], turned)


@both
def test_sequences_are_scored_as_defined(causal):
    model, tokens = classifier(AutoModelForSequenceClassification, causal=causal), prompts()
    x = model.model.hidden(tokens)
    pooled = x[:, -1] if causal else x.mean(1)
    assert_close(model(tokens).logits, pooled @ model.score.weight.T)


@both
def test_a_sequence_without_tokens_has_no_scores(causal):
    model, tokens = classifier(AutoModelForSequenceClassification, causal=causal), prompts()
    mask = torch.ones_like(tokens)
    mask[1] = 0
    logits = model(tokens, attention_mask=mask).logits
    assert_close(logits[1], torch.zeros_like(logits[1]))
    assert_close(logits[[0, 2]], model(tokens[[0, 2]]).logits)
    assert_close(model(tokens[:, :0]).logits, torch.zeros_like(logits))


@pytest.mark.parametrize(
    ("problem", "labels", "loss"),
    [
        ("regression", torch.randn(3, 2, dtype=torch.float64), torch.nn.functional.mse_loss),
        ("single_label_classification", torch.tensor([0, 1, 1]), torch.nn.functional.cross_entropy),
        (
            "multi_label_classification",
            torch.randint(2, (3, 2)).double(),
            torch.nn.functional.binary_cross_entropy_with_logits,
        ),
    ],
)
def test_losses_of_sequences(problem, labels, loss):
    model = classifier(AutoModelForSequenceClassification, causal=False, num_labels=2, problem_type=problem)
    output = model(prompts(), labels=labels)
    assert_close(output.loss, loss(output.logits, labels))


def test_missing_tokens_have_no_loss():
    model = classifier(AutoModelForTokenClassification, causal=False)
    tokens, mask = left_padded([[5, 6], [1, 2, 3]])
    labels = torch.tensor([[2, 0, 1], [0, -100, 2]])
    output = model(tokens, attention_mask=mask, labels=labels)
    kept = [(0, 1), (0, 2), (1, 0), (1, 2)]
    logits = torch.stack([output.logits[place] for place in kept])
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor([labels[place] for place in kept]))
    # transformers computes losses in float32
    assert_close(output.loss, wanted.float())


def test_an_encoder_learns_to_classify(tmp_path):
    """Which of two tokens is in the sequence, and more often: nothing that the last token alone tells."""
    tokens = torch.randint(2, 31, (256, 12))
    labels = torch.randint(2, (256,))
    tokens[torch.arange(256), torch.randint(12, (256,))] = labels
    rows = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    given = config("elu", causal=False)
    given.num_labels = 2
    model = AutoModelForSequenceClassification.from_config(given)
    trainer(model, tmp_path, rows, max_steps=60, learning_rate=3e-3).train()
    model.save_pretrained(tmp_path / "classifier")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert (loaded(tokens).logits.argmax(-1) == labels).double().mean() > 0.95


def test_an_encoder_predicts_no_next_token(tmp_path):
    with pytest.raises(ValueError, match="causal is False"):
        LinattnForCausalLM(config("elu", causal=False))
    encoder = LanguageModel(config("elu", causal=False).to_language_model())
    encoder.save(tmp_path)
    with pytest.raises(ValueError, match="causal is False"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="not causal"):
        encoder.extend(prompts())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convolution": 3}, "a short convolution is causal"),
        ({"attention": "convolution:3"}, "a convolution is causal"),
        ({"attention": "retention"}, "causal"),
    ],
)
def test_what_needs_an_order_is_refused_in_encoders(options, message):
    with pytest.raises(ValueError, match=message):
        config("elu", causal=False, **options)
