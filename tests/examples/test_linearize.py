"""The examples of conversions: tasks obey their definitions, a run has its controls, tables say what the runs say."""

import json
import struct
import sysconfig
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from examples.linearize import byte_lm, encoder, recall, report, run, speech, vision
from examples.linearize.task import measure
from examples.linearize.training import fit, teacher

TASKS = {name: replace(task, steps=4) for name, task in run.TASKS.items()}


def test_the_held_out_text_is_other_files(tmp_path, monkeypatch):
    """Every 15th of 31 modules of 100 equal bytes each."""
    for i in range(31):
        (tmp_path / f"m{i:02}.py").write_bytes(bytes([i]) * 100)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    training, held_out = byte_lm.text.__wrapped__()
    assert held_out.unique().tolist() == [0, 15, 30] and len(held_out) == 300
    assert training.unique().tolist() == [i for i in range(31) if i % 15] and len(training) == 2_800


def test_a_batch_is_of_the_training_text():
    batch = byte_lm.ByteText(0).batch()
    assert batch["input_ids"].shape == (byte_lm.BATCH, byte_lm.CONTEXT)
    training = byte_lm.text()[0].numpy().tobytes()
    assert all(bytes(row) in training for row in batch["input_ids"].tolist())


def test_an_answer_is_the_label_of_the_place_after_the_question():
    batch = recall.Recall(0).held_out()[0]
    asked = (batch["labels"] != -100).nonzero()
    for row, place in asked[:50].tolist():
        tokens = batch["input_ids"][row].tolist()
        key = tokens[place - 1]
        assert batch["labels"][row, place] == tokens[tokens.index(key) + 1]


def test_the_class_is_the_value_of_the_key_that_is_asked():
    batch = encoder.generate(np.random.default_rng(0), 50)
    for ids, mask, label in zip(
        *(batch[name].tolist() for name in ("input_ids", "attention_mask", "labels")), strict=True
    ):
        key = ids[1] - encoder.QUESTIONS
        pairs = [token - encoder.PAIRS for token, present in zip(ids[2:], mask[2:], strict=True) if present]
        found = [pair % encoder.CLASSES for pair in pairs if pair // encoder.CLASSES == key]
        assert found == [label] and encoder.SHORTEST <= len(pairs) <= encoder.LONGEST
        assert all(token == encoder.PADDING for token, present in zip(ids, mask, strict=True) if not present)


def test_images_keep_their_labels(tmp_path):
    # each image has one bright row of 5 pixels, whose place is its label
    labels = np.arange(1_100) % 10
    images = np.zeros((1_100, 28, 28), np.uint8)
    images[np.arange(1_100), 5 + labels, 10:15] = 255
    for name, magic, array in (("images-idx3", 0x803, images), ("labels-idx1", 0x801, labels.astype(np.uint8))):
        header = struct.pack(f">{1 + array.ndim}i", magic, *array.shape)
        (tmp_path / f"few-{name}-ubyte").write_bytes(header + array.tobytes())
    data = vision.Digits(0, tmp_path / "few-images-idx3-ubyte")
    held_out, batch = data.held_out(), data.batch()
    assert sum(len(each["labels"]) for each in held_out) == vision.TEST
    for each, moved in ((held_out[0], 0), (batch, 2)):
        place = (each["pixel_values"] > 0).any(-1).int().argmax(-1).squeeze(1) - 5 - each["labels"]
        assert place.abs().max() <= moved and len(place.unique()) == 1
    with pytest.raises(SystemExit):
        run.main(["--task", "vision", "--row", "linear_20", "--folder", "x", "--out", "y"])


def test_a_vowel_is_the_sum_of_its_harmonics_and_loudest_at_its_resonances():
    for low, high in speech.VOWELS:
        sound = speech.vowel((low, high), 100, 1.0, 1_600)
        phase = 2 * np.pi * 100 * np.arange(1_600) / speech.RATE
        loud = [sum(np.exp(-(((100 * k - f) / 150) ** 2)) for f in (low, high)) for k in range(1, 40)]
        wave = sum(a * np.sin(k * phase) for k, a in enumerate(loud, 1))
        np.testing.assert_allclose(sound, np.hanning(1_600) * wave / 4, atol=1e-12)
        peak = 10 * np.abs(np.fft.rfft(sound))[:400].argmax()
        assert min(abs(peak - low), abs(peak - high)) <= 100


def test_an_utterance_has_two_sounds_per_word():
    random = np.random.default_rng(0)
    batch = speech.generate(random, 20)
    assert batch["input_features"].shape == (20, speech.MELS, 100 * speech.SECONDS)
    for labels in batch["labels"].tolist():
        words = [label for label in labels if label >= speech.FIRST]
        assert labels[: len(words) + 1] == [*words, speech.END] and set(labels[len(words) + 1 :]) <= {-100}
    for count in (1, 3):
        wave = speech.spoken([(0, 2)] * count, random)
        loud = np.abs(wave).reshape(-1)[: len(wave) // 100 * 100].reshape(-1, 100).max(1) > 0.12
        assert np.diff(loud.astype(int)).clip(0).sum() == 2 * count


def test_measure_is_of_all_labels():
    torch.manual_seed(0)
    model, data = encoder.model(), encoder.TASK.data(0)
    batches = data.held_out()
    logits = torch.cat([model(**{k: v for k, v in each.items() if k != "labels"}).logits for each in batches])
    labels = torch.cat([each["labels"] for each in batches])
    expected = float((logits.argmax(-1) == labels).double().mean())
    assert measure(model, batches)["accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_controls_take_orthogonal_steps_and_teachers_do_not(orthogonal):
    torch.manual_seed(0)
    model, task = encoder.model(), replace(encoder.TASK, weight_decay=0.0)
    matrices = [module.weight for module in model.bert.encoder.modules() if isinstance(module, torch.nn.Linear)]
    before = [matrix.detach().clone() for matrix in matrices]
    fit(model, task.data(0), task, steps=1, lr=1e-2, orthogonal=orthogonal)
    for matrix, old in zip(matrices, before, strict=True):
        found = torch.linalg.svdvals(matrix.detach() - old)
        # the first gradients have few directions: a step of AdamW has one that is far larger than the others
        assert found[0] > 0 and (found.mean() > 0.14 * found[0]) == orthogonal


def test_a_teacher_whose_writing_is_interrupted_is_trained_again(tmp_path, monkeypatch):
    task = TASKS["encoder"]
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedConfig, "save_pretrained", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            teacher(task, 0, tmp_path)
    steps: list[str] = []
    teacher(task, 0, tmp_path, steps.append)
    assert steps
    steps.clear()
    teacher(task, 0, tmp_path, steps.append)
    assert not steps


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Rows of four steps: a conversion with a layer that is kept, and its controls."""
    folder = tmp_path_factory.mktemp("linearize")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "TASKS", TASKS)
        patch.setattr(encoder, "TEST", 32)
        patch.setitem(run.ROWS, "linear_20", run.Row(share=1.0, kept=1))
        arguments = ["--task", "encoder", "--folder", str(folder), "--out", str(folder / "runs.jsonl"), "--row"]
        run.main([*arguments, "linear_20", "teacher_20", "scratch_20"])
        before = (folder / "runs.jsonl").read_text()
        run.main([*arguments, "linear_20"])
        assert (folder / "runs.jsonl").read_text() == before
        # which is said before a teacher is trained
        patch.setattr(run, "teacher", lambda *_: pytest.fail("trained"))
        with pytest.raises(SystemExit, match="which must be run first"):
            run.main([*arguments, "scratch_50"])
    return [json.loads(line) for line in before.splitlines()]


def test_a_run_has_its_controls_and_controls_take_as_long(runs):
    converted, *controls = runs
    assert set(converted["controls"]) == {"window alone", "linear part off", "uniform attention"}
    assert converted["steps"] == 4 and len(converted["kept"]) == 1
    assert converted["teacher"]["kl"] == 0 and converted["scores"]["kl"] > 0
    for control in controls:
        assert control["seconds"] >= converted["seconds"] - 0.1 and control["steps"] >= 1


def test_the_tables_have_every_run(runs):
    page = "\n".join(f"before {name}\n<!-- table {name} -->\nold\n<!-- end -->" for name in (*run.TASKS, "controls"))
    made = report.with_tables(page, runs)
    assert "old" not in made and "before encoder" in made
    _, teacher, *rows = [line for line in report.table(run.TASKS["encoder"], runs).splitlines() if "---" not in line]
    assert teacher.startswith("| **the teacher** | 0 |") and len(rows) == 3
    assert "trained on" in rows[1] and "from scratch" in rows[2]
    with pytest.raises(ValueError, match="no place for a table"):
        report.with_tables("nothing", runs)
