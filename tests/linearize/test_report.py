"""The report's figures are their definitions, its controls are undone, and it says when linear attention is idle."""

import json
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import Cache, DynamicCache

from linattn.integrations.transformers.state_layer import cache_bytes
from linattn.linearize import (
    CONTROLS,
    Budget,
    Conversion,
    Probes,
    Report,
    Scores,
    controlled,
    convert,
    entropies,
    fine_tune,
    layer_errors,
    linearized_layers,
    plan,
    report,
    scores,
)
from linattn.linearize.attention import own_attention
from linattn.linearize.calls import run
from linattn.linearize.probes import NEEDLE, costs, greedy_agreement, needles, recall
from linattn.linearize.report import AFTER, BEFORE, OFF, WINDOW, Recall
from tests.integrations.transformers.stock_attention.families import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    EXPERTS,
    GROUPED,
    IMAGES,
    TEXT,
    VOCABULARY,
    WINDOWED,
    every,
    make,
)

SOME = {"llama": DECODERS["llama"], "gpt2": DECODERS["gpt2"], "bert": ENCODERS["bert"], **EXPERTS}
CLASSIFIER = ("BertForSequenceClassification", {**TEXT, "num_labels": 4})
N = 11


def batch(model: Any, rows: int = 3) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right."""
    mask = (torch.arange(N) < torch.tensor([N, 7, 9])[:rows, None]).long()
    return {"input_ids": torch.randint(3, VOCABULARY, (rows, N)), "attention_mask": mask}


def start(family: Any, method: str = "elu", **options: Any) -> tuple[Conversion, list[dict[str, torch.Tensor]]]:
    model = make(family)
    batches = [batch(model), batch(model)]
    if family is CLASSIFIER:
        batches = [{**each, "labels": torch.tensor([0, 3, 1])} for each in batches]
    return convert(model, plan(model, batches[0], method=method, **options), batches), batches


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_language_models_scores_are_their_definition(side):
    """Of all present tokens after a present one, on whichever side of them the padding is."""
    made, batches = start(DECODERS["llama"])
    if side == "left":
        batches = [{name: x.flip(1) for name, x in each.items()} for each in batches]
    found = scores(made.model, made.teacher, batches)
    loss, kl, same, right = [], [], [], []
    made.model.requires_grad_(False)
    for each in batches:
        y, t = (model(**each).logits.log_softmax(-1) for model in (made.model, made.teacher))
        for b, i in each["attention_mask"].bool().nonzero().tolist():
            if i == 0 or not each["attention_mask"][b, i - 1]:
                continue
            p, q, token = y[b, i - 1], t[b, i - 1], each["input_ids"][b, i]
            loss.append(-p[token])
            kl.append((q.exp() * (q - p)).sum())
            same.append(p.argmax() == q.argmax())
            right.append(p.argmax() == token)
    assert_close(found.loss * math.log(2), float(sum(loss) / len(loss)))
    assert_close(found.kl * math.log(2), float(sum(kl) / len(kl)))
    assert_close(found.agreement, float(sum(same) / len(same)))
    assert_close(found.accuracy, float(sum(right) / len(right)))
    assert len(found.losses) == 2
    itself = scores(made.teacher, made.teacher, batches)
    assert (itself.kl, itself.agreement) == (0, 1)


def test_a_classifiers_scores_are_of_its_rows():
    made, batches = start(CLASSIFIER)
    found = scores(made.model, made.teacher, batches)
    made.model.requires_grad_(False)
    y, t = (torch.cat([model(**each).logits for each in batches]) for model in (made.model, made.teacher))
    labels = torch.cat([each["labels"] for each in batches])
    assert_close(found.loss * math.log(2), float(F.cross_entropy(y, labels)))
    assert_close(found.cosine, float(F.cosine_similarity(y, t).mean()))


def test_an_encoders_scores_are_of_its_present_tokens():
    made, batches = start(ENCODERS["bert"])
    found = scores(made.model, made.teacher, batches)
    y, t = (
        torch.cat([model(**each).last_hidden_state[each["attention_mask"].bool()] for each in batches])
        for model in (made.model, made.teacher)
    )
    assert_close(found.cosine, float(F.cosine_similarity(y, t, dim=-1).mean()))
    assert (found.loss, found.kl, found.losses) == (None, None, ())


@every(SOME)
@pytest.mark.parametrize("method", ["elu", "taylor2", "local:2+elu:2"])
def test_a_window_over_everything_is_the_teacher(family, method):
    made, batches = start(family, method, window=16, key_dim=4)
    before = scores(made.model, made.teacher, batches)
    with controlled(made.model, CONTROLS["window alone"]):
        found = scores(made.model, made.teacher, batches)
    assert_close(found.cosine, 1.0)
    assert found.kl is None or found.kl < 1e-10
    assert scores(made.model, made.teacher, batches) == before


def outputs(model: Any, name: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return what every linearized layer puts out, (b, h, n, d) each."""
    seen = []

    def control(call):
        seen.append((call.v, call.key_mask, call.y, CONTROLS[name](call)))
        return call.y

    with controlled(model, control), torch.no_grad():
        run(model, given)
    return seen


def test_a_control_without_effect_is_an_error():
    made, batches = start(DECODERS["llama"])
    with (
        pytest.raises(ValueError, match="calls without a cache, but the block has no such call"),
        controlled(made.model, CONTROLS["window alone"]),
    ):
        made.model(**batches[0])


@every({"llama": DECODERS["llama"], "bert": ENCODERS["bert"], **EXPERTS})
def test_uniform_attention_is_the_mean_of_what_is_seen(family):
    made, batches = start(family)
    for v, mask, _, y in outputs(made.model, "uniform attention", batches[0]):
        for i in range(N):
            seen = mask[:, 0].clone()
            if family is not ENCODERS["bert"]:
                seen[:, i + 1 :] = False
            mean = (v * seen[:, None, :, None]).sum(2) / seen.sum(-1)[:, None, None]
            assert_close(y[:, :, i], mean.repeat_interleave(y.shape[1] // v.shape[1], 1))


@pytest.mark.parametrize("n", [4, N])
def test_a_window_holds_nothing_of_another_sequence(n):
    made, batches = start(ENCODER_DECODERS["bart"])
    text = {**batches[0], "decoder_input_ids": torch.randint(3, VOCABULARY, (3, n)), "use_cache": False}
    crossing = [not own_attention(layer).spec.dim for layer in linearized_layers(made.model).values()]
    seen = outputs(made.model, "window alone", text)
    assert sorted(not y.count_nonzero() for *_, y in seen) == sorted(crossing) and any(crossing)
    for name in CONTROLS:
        with controlled(made.model, CONTROLS[name]), torch.no_grad():
            assert made.model(**text).logits.isfinite().all()


def test_without_its_linear_part_a_mixture_has_its_window():
    made, batches = start(DECODERS["gpt2"], "local:2+elu:2", window=3)
    for _, _, y, off in outputs(made.model, "linear part off", batches[0]):
        assert_close(off[:, :2], y[:, :2], rtol=0, atol=0)
        assert off[:, 2:].abs().max() == 0 < y[:, 2:].abs().max()


@every({"llama": DECODERS["llama"], "modernbert": ENCODERS["modernbert"], **WINDOWED})
def test_entropies_are_those_of_the_weights(family):
    model = make(family)
    inputs = batch(model)
    model.set_attn_implementation("linattn:softmax")
    found = entropies(model, inputs)
    model.set_attn_implementation("eager")
    weights = model(**inputs, output_attentions=True).attentions
    bits = [torch.special.entr(each).sum(-1).transpose(0, 1) / math.log(2) for each in weights]
    expected = [float(each[:, inputs["attention_mask"].bool()].detach().mean()) for each in bits]
    assert list(found.values()) == pytest.approx(expected)


def test_entropies_of_softmax_are_the_teachers():
    made, batches = start(DECODERS["llama"], "softmax", convolution=0)
    assert entropies(made.model, batches[0]) == pytest.approx(entropies(made.teacher, batches[0]))
    with torch.no_grad():
        for layer in made.teacher.modules():
            if hasattr(layer, "q_proj"):
                layer.q_proj.weight.zero_()
    counts = [i + 1 for length in (N, 7, 9) for i in range(length)]
    uniform = sum(map(math.log2, counts)) / len(counts)
    assert list(entropies(made.teacher, batches[0]).values()) == pytest.approx([uniform, uniform])


def test_needles_come_twice_or_once():
    text = torch.randint(1000, (500,))
    known, alone = (needles(text, 100, rows=4, known=known) for known in (True, False))
    assert torch.equal(known[:, :NEEDLE], known[:, -NEEDLE:])
    assert torch.equal(known[:, NEEDLE:], alone[:, NEEDLE:])
    assert not torch.equal(alone[:, :NEEDLE], alone[:, -NEEDLE:])
    with pytest.raises(ValueError, match="at least 64 tokens"):
        needles(text, 63, rows=1, known=True)


def test_recall_counts_the_second_half_of_the_passage():
    made, _ = start(DECODERS["llama"])
    rows = torch.randint(3, VOCABULARY, (2, 70))
    likeliest = made.teacher(rows).logits.argmax(-1)
    expected = (likeliest[:, -NEEDLE // 2 - 1 : -1] == rows[:, -NEEDLE // 2 :]).double().mean()
    assert recall(made.teacher, rows) == pytest.approx(float(expected))


def test_recalled_tokens_are_those_that_the_model_predicts():
    made, _ = start(DECODERS["llama"])
    rows = torch.randint(3, VOCABULARY, (2, 70))
    for place in range(70 - NEEDLE // 2, 70):
        rows[:, place] = made.teacher(rows[:, :place]).logits[:, -1].argmax(-1)
    assert recall(made.teacher, rows) == 1
    # nothing comes after the last one
    rows[:, -1] = (rows[:, -1] + 1) % VOCABULARY
    assert recall(made.teacher, rows) == 1 - 2 / NEEDLE


def test_texts_are_compared_up_to_the_first_difference():
    made, _ = start(DECODERS["llama"])
    for model, text in ((made.model, [7, 1, 2, 3, 4]), (made.teacher, [7, 1, 2, 9, 4])):
        model.generate = lambda *_, text=text, **__: torch.tensor([text])
    found = greedy_agreement(made.model, made.teacher, torch.tensor([[7]]), tokens=4)
    assert found == (0.75, 2.0, 4, (([7], [1, 2, 9, 4], [1, 2, 3, 4]),))


def test_without_a_window_a_token_sees_itself():
    made, batches = start(DECODERS["gpt2"], window=0)
    for v, _, _, y in outputs(made.model, "window alone", batches[0]):
        assert_close(y, v)


def test_generated_text_is_compared_token_by_token():
    made, _ = start(DECODERS["llama"])
    prompts = torch.randint(3, VOCABULARY, (2, 5))
    assert greedy_agreement(made.teacher, made.teacher, prompts, tokens=6)[:3] == (1.0, 6.0, 6)
    made.model.lm_head.weight.data.neg_()
    assert greedy_agreement(made.model, made.teacher, prompts, tokens=6).agreement < 1


def test_texts_are_greedy_whatever_the_checkpoint_generates_by_itself():
    made, _ = start(DECODERS["llama"])
    prompts = torch.randint(3, VOCABULARY, (2, 5))
    texts = []
    for model in (made.teacher, made.model):
        model.generation_config.update(num_beams=2, num_return_sequences=2, return_dict_in_generate=True)
        ids = prompts
        for _ in range(6):
            likeliest = model(ids, use_cache=False).logits[:, -1]
            # the end of a text is not among the first tokens
            likeliest[:, model.config.eos_token_id] = -math.inf
            ids = torch.cat([ids, likeliest.argmax(-1, keepdim=True)], 1)
        texts.append(ids[:, 5:].tolist())
    found = greedy_agreement(made.model, made.teacher, prompts, tokens=6)
    assert [(sample.teacher, sample.linear) for sample in found.samples] == list(zip(*texts, strict=True))


def test_the_cache_of_a_linear_model_has_a_constant_size():
    made, _ = start(DECODERS["llama"])
    stock = make(DECODERS["llama"])
    small, large = (costs([made.model, stock], tokens, repeats=2, piece=5) for tokens in (8, 24))
    states = 8 * sum(layer.state_numbers for layer in made.plan.layers)
    assert small[0].bytes == large[0].bytes == states
    assert [pair[1].bytes for pair in (small, large)] == [2 * 2 * 2 * 8 * 8 * tokens for tokens in (8, 24)]
    cache: Cache = DynamicCache(config=stock.config)
    assert cache_bytes(cache) == 0


def test_a_model_of_several_parts_has_the_costs_of_its_decoder():
    vision = {"model_type": "clip_vision_model", **IMAGES["clip_vision"][1]}
    parts = {"text_config": {"model_type": "llama", **GROUPED}, "vision_config": vision}
    model, text = make(("LlavaForConditionalGeneration", parts)), make(DECODERS["llama"])
    assert [cost.bytes for cost in costs([model, text], 8, repeats=1)] == 2 * [2 * 2 * 2 * 8 * 8 * 8]


def test_the_report_has_every_part_as_json():
    made, batches = start(DECODERS["llama"])
    probes = Probes(
        text=torch.randint(3, VOCABULARY, (200,)),
        recall_lengths=(64,),
        recall_rows=2,
        prompts=batches[0]["input_ids"],
        new_tokens=4,
        cost_lengths=(8,),
    )
    stages: list[str] = []
    found = report(made.model, made.teacher, batches, probes, progress=stages.append)
    record = json.loads(json.dumps(found.to_dict()))
    assert set(record["scores"]) == {"teacher", "linear", *CONTROLS}
    assert [layer["name"] for layer in record["layers"]] == list(linearized_layers(made.model))
    assert record["recall"][0]["length"] == 64 and record["generated"]["tokens"] == 4
    assert record["costs"][0]["model"]["tokens"] == 8
    assert record["sentences"][0].startswith("The linear model has a loss of ")
    assert len(record["sentences"]) >= 4 and record["sentences"][1].startswith("The linear part ")
    assert [len(sample["teacher"]) for sample in record["generated"]["samples"]] == [4, 4]
    assert stages == ["scores", "generated text", "layers", "recall over 64 tokens", "a token after 8"]
    assert found.left_out == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": 0}, "new_tokens must be a whole number of at least 1, but is 0"),
        ({"recall_rows": 0}, "recall_rows must be a whole number of at least 1, but is 0"),
        ({"cost_lengths": [8, 0]}, r"cost_lengths must be a whole number of at least 1, but is \(8, 0\)"),
        ({"prompts": torch.ones(4).long()}, r"prompts must be int64 or int32 \(b, n\), but are torch.int64 \(4,\)"),
        ({"prompts": torch.ones(2, 4)}, r"prompts must be int64 or int32 \(b, n\), but are torch.float32 \(2, 4\)"),
        ({"prompts": torch.ones(2, 0).long()}, r"prompts must have a token in each row, but are \(2, 0\)"),
        ({"recall_lengths": (64,)}, "need a text"),
        ({"recall_lengths": (64,), "text": torch.ones(95).long()}, "has 64 and the text 95"),
    ],
)
def test_probes_that_cannot_be_measured_are_refused_before_any_measurement(options, message):
    with pytest.raises(ValueError, match=message):
        Probes(**options)


def test_a_batch_without_present_tokens_has_no_errors_of_layers_and_no_entropies():
    made, batches = start(DECODERS["llama"])
    absent = {**batches[0], "attention_mask": torch.zeros_like(batches[0]["input_ids"])}
    with pytest.raises(ValueError, match="each batch must have a present token, but one has none"):
        layer_errors(made.model, made.teacher, [batches[0], absent])
    with pytest.raises(ValueError, match="the batch must have a present token, but has none"):
        entropies(made.model, absent)


def test_tokens_in_int32_are_those_in_int64():
    made, batches = start(DECODERS["llama"])
    short = [{**each, "input_ids": each["input_ids"].int()} for each in batches]
    assert scores(made.model, made.teacher, short) == scores(made.model, made.teacher, batches)
    assert fine_tune(made.model, made.teacher, short, Budget(steps=1)).steps == 1


def test_embeddings_in_the_place_of_tokens_have_scores_without_a_loss():
    made, batches = start(DECODERS["llama"])
    embedded = [{"inputs_embeds": made.model.get_input_embeddings()(each["input_ids"]).detach()} for each in batches]
    found, expected = (scores(made.model, made.teacher, given) for given in (embedded, batches))
    assert (found.loss, found.losses) == (None, ()) and expected.loss is not None
    assert report(made.model, made.teacher, embedded).scores["linear"] == found
    assert fine_tune(made.model, made.teacher, embedded, Budget(steps=1)).steps == 1


def test_a_report_ends_in_time_with_two_batches_at_least():
    made, batches = start(DECODERS["llama"])
    probes = Probes(prompts=batches[0]["input_ids"], new_tokens=4, cost_lengths=(8,))
    swapped_in = scores(made.model, made.teacher, batches)
    found = report(made.model, made.teacher, 3 * batches, probes, seconds=0.0, swapped_in=swapped_in)
    assert list(found.scores) == ["teacher", "swapped in", "linear", *CONTROLS]
    assert found.scores["swapped in"] == found.scores["linear"] == swapped_in
    assert (found.generated, found.layers, found.costs) == (None, (), ())
    assert found.left_out == ("generated text", "layers", "a token after 8")
    assert found.sentences()[-1] == "There was no time for generated text, layers, a token after 8."
    assert any(f"its loss was {swapped_in.loss:.3f} bits" in sentence for sentence in found.sentences())
    unlimited = report(made.model, made.teacher, 3 * batches, probes, seconds=1e9)
    assert len(unlimited.scores["linear"].losses) == 6 and unlimited.left_out == ()


def test_it_says_when_the_teacher_itself_fails_to_recall():
    rows = {name: Scores(None, None, None, None, 1.0, ()) for name in (BEFORE, AFTER, WINDOW, OFF)}
    recalls = tuple(Recall(n, 0.4, teacher, 0.1, 0.1) for n, teacher in ((512, 0.9), (2_048, 0.49), (8_192, 0.0)))
    said = Report("LlamaForCausalLM", "elu", 16, rows, (), recall=recalls).sentences()
    assert "The teacher itself fails to recall (49 % over 2,048 tokens, 0 % over 8,192 tokens), so this" in said[-1]
    assert not any("fails" in x for x in Report("Llama", "elu", 16, rows, (), recall=recalls[:1]).sentences())


def test_it_says_when_the_linear_part_does_nothing():
    made, batches = start(DECODERS["llama"])
    for model in (made.model, made.teacher):
        for layer in model.modules():
            if hasattr(layer, "o_proj"):
                layer.o_proj.weight.data.zero_()
    assert "The linear part does nothing" in report(made.model, made.teacher, batches).verdict()


def said_of(differences: list[float]) -> str:
    """Return the verdict where the removal of the linear part changes the losses by so much."""
    rows = {
        name: Scores(1.0, 0.5, 0.1, 0.9, 1.0, tuple(1 + x * (name == OFF) for x in differences))
        for name in (BEFORE, AFTER, WINDOW, OFF)
    }
    return Report("LlamaForCausalLM", "elu", 16, rows, ()).verdict()


def test_the_verdict_has_a_sign_and_needs_two_batches():
    assert said_of([0.1, 0.4]) == (
        "The linear part does nothing: its removal changes the loss by +0.2500 bits, and the noise is 0.3000."
    )
    assert said_of([0.1, 0.2]).startswith("The linear part matters: its removal changes the loss by +0.1500 bits")
    assert said_of([-0.1, -0.2]).startswith("The linear part does harm: its removal changes the loss by -0.1500 bits")
    assert said_of([0.3]) == (
        "A single batch does not tell whether the linear part matters: its removal changes the loss by +0.3000 bits, "
        "and the noise is unknown."
    )


def test_the_result_is_the_quality_that_is_left():
    def result(before: Scores, after: Scores) -> str:
        return Report("LlamaForCausalLM", "elu", 16, {BEFORE: before, AFTER: after}, ()).result()

    teacher = Scores(2.0, 0.5, 0.0, 1.0, 1.0, (2.0,))
    assert result(teacher, Scores(2.1, 0.5, 0.1, 0.906, 0.9, (2.1,))) == (
        "The linear model has a loss of 2.100 bits per prediction, +5.0 % from the softmax model's 2.000; 90.6 % of "
        "their most likely predictions are the same."
    )
    assert "prediction, less than 0.1 % from the softmax model's 2.000" in result(teacher, teacher)
    without = Scores(None, None, None, None, 1.0, ())
    assert result(without, without._replace(cosine=0.984)) == (
        "The outputs of the linear model have a cosine of 0.984 to the softmax model's."
    )


@pytest.mark.parametrize(("off", "words"), [(0.9, "by -0.100"), (1.0, "by less than 0.001"), (0.9999, "less than")])
def test_a_change_that_rounds_to_nothing_has_no_sign(off, words):
    rows = {name: Scores(None, None, None, None, 1.0, ()) for name in (BEFORE, AFTER, WINDOW)}
    rows[OFF] = rows[AFTER]._replace(cosine=off)
    assert words in Report("BertModel", "elu", 16, rows, ()).verdict()


@pytest.mark.parametrize("silent", [{"labels": torch.full((3, N), -100)}, {"input_ids": torch.ones(2, 1).long()}])
def test_a_batch_without_predictions_has_no_scores(silent):
    made, batches = start(DECODERS["llama"])
    with pytest.raises(ValueError, match="each batch must ask for a prediction"):
        scores(made.model, made.teacher, [batches[0], {"input_ids": batches[0]["input_ids"], **silent}])
    with pytest.raises(ValueError, match="at least one batch"):
        report(made.model, made.teacher, [])


def test_it_says_when_a_window_does_as_well():
    made, batches = start(DECODERS["llama"], window=16)
    # labels are what the teacher predicts, which the window over everything predicts, too
    for each in batches:
        likeliest = made.teacher(**each).logits.argmax(-1)
        each["labels"] = torch.cat([likeliest[:, :1], likeliest[:, :-1]], 1)
    said = report(made.model, made.teacher, batches).sentences()
    assert any(sentence.startswith("A window of 16 tokens alone does as well") for sentence in said)


def test_a_model_without_linear_layers_has_no_report():
    model = make(DECODERS["llama"])
    with pytest.raises(ValueError, match="no linearized layer"):
        report(model, model, [batch(model)])
