"""Windows that continue others are trained on as parts of one text, of which each has a gradient of its own."""

from collections import deque
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from linattn.integrations.transformers import StatefulTrainer
from linattn.models.loss import NO_LABEL
from linattn.ops.nested import map_state

from .models import MODELS, SIZE, make

ROWS, STEPS, WINDOW = 4, 5, 7
CONSTANT = [name for name in MODELS if name != "softmax"]


def texts(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(SIZE["vocab_size"], (rows, STEPS * WINDOW + 1))


def windows(rows: torch.Tensor, begins: tuple[tuple[int, int], ...] = ()) -> list[dict[str, torch.Tensor]]:
    """Cut each text into windows that share a token: row r of a step continues row r of the step before, but for the
    steps and rows in `begins`."""
    return [
        {"input_ids": window, "labels": window, "continues": torch.tensor(step > 0 and (step, row) not in begins)}
        for step in range(STEPS)
        for row, window in enumerate(rows[:, step * WINDOW : (step + 1) * WINDOW + 1])
    ]


class Gradients(TrainerCallback):
    """Keeps the gradients of every update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seen.append({name: weight.grad.clone() for name, weight in kwargs["model"].named_parameters()})


def trainer(model, folder, data, kind=StatefulTrainer, **options) -> Trainer:
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
    }
    return kind(model=model, args=TrainingArguments(**{**arguments, **options}), train_dataset=data)


def losses(run: Trainer) -> torch.Tensor:
    return torch.tensor([entry["loss"] for entry in run.state.log_history if "loss" in entry], dtype=torch.float64)


def definition(model, rows, begins=()) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return the loss of each update and its gradients, by `extend` from states without a gradient, row by row."""
    results, states = [], [None] * len(rows)
    for step, first in product(range(STEPS), range(0, len(rows), ROWS)):
        total = 0.0
        for row in range(first, first + ROWS):
            if (step, row) in begins:
                states[row] = None
            window = rows[row, step * WINDOW : (step + 1) * WINDOW + 1]
            logits, state = model.model.extend(window[None, :-1], states[row])
            states[row] = map_state(torch.Tensor.detach, state)
            total = total + F.cross_entropy(logits[0], window[1:], reduction="sum")
        model.zero_grad()
        loss = total / (ROWS * WINDOW)
        loss.backward()
        results.append((loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}))
    model.zero_grad()
    return results


HALVES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CASES = [(name, ROWS, {}) for name in CONSTANT] + [("local+elu", ROWS, HALVES), ("local+elu", 2 * ROWS, HALVES)]


@pytest.mark.parametrize(("name", "count", "options"), CASES)
def test_windows_have_the_gradients_of_their_text_with_states_detached(name, count, options, tmp_path):
    """Row 1 begins anew in step 2, and all rows in step 3. Also if an update takes two batches, and if two updates read
    the texts in turn."""
    model, rows, begins = make(name), texts(count), ((2, 1), *((3, row) for row in range(count)))
    expected, gradients = definition(model, rows, begins), Gradients()
    options = {"optim": "sgd", "learning_rate": 0.0, "max_steps": len(expected), **options}
    run = trainer(model, tmp_path, windows(rows, begins), **options)
    run.rows = count
    run.add_callback(gradients)
    run.train()
    # transformers rounds what it logs
    assert_close(losses(run), torch.stack([loss for loss, _ in expected]), rtol=1e-3, atol=1e-3)
    for ours, (_, theirs) in zip(gradients.seen, expected, strict=True):
        # transformers computes the loss in float32
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows_before", [ROWS, 2 * ROWS])
def test_a_run_leaves_no_state_to_the_next(rows_before, tmp_path):
    """The first run is interrupted, perhaps because its `rows` were wrong."""
    model, rows = make("elu"), texts(2 * ROWS)
    expected = definition(model, rows)
    run = trainer(model, tmp_path, windows(rows), optim="sgd", learning_rate=0.0, max_steps=len(expected))
    run.rows, calls = rows_before, []

    def interrupt(_, args, options):
        calls.append("labels" in options)
        if sum(calls) == 3:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(interrupt, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    handle.remove()
    run.rows = len(rows)
    run.train()
    assert_close(losses(run), torch.stack([loss for loss, _ in expected]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CONSTANT)
def test_windows_have_the_logits_of_their_text(name, tmp_path):
    model, rows, logits = make(name), texts(), []
    run = trainer(model, tmp_path, windows(rows), optim="sgd", learning_rate=0.0)
    model.register_forward_hook(lambda module, inputs, output: logits.append(output.logits.detach()))
    run.train()
    # the first call reads no token
    with torch.no_grad():
        assert_close(torch.cat(logits[1:], 1), model.model(rows[:, :-1]))


@pytest.mark.parametrize("segment", [None, 3])
def test_a_short_window_may_be_masked(segment, tmp_path):
    """It is the last one of its text. As it has no labels there, the gradients are those without the mask."""
    model, data, kept = make("local+elu"), windows(texts(), ((2, 0),)), torch.arange(WINDOW + 1) < 5
    data[ROWS]["labels"] = data[ROWS]["labels"].masked_fill(~kept, NO_LABEL)
    masked = [example | {"attention_mask": torch.ones(WINDOW + 1).long()} for example in data]
    masked[ROWS]["attention_mask"] = kept.long()
    results = []
    for examples, length in ((data, None), (masked, segment)):
        model.segment_length, gradients = length, Gradients()
        run = trainer(model, tmp_path, examples, optim="sgd", learning_rate=0.0)
        run.add_callback(gradients)
        run.train()
        results.append(gradients.seen)
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "count", "examples", "steps"),
    [
        ("local+elu", ROWS, None, 3),
        ("gated_delta", 2 * ROWS, None, 3),
        # the break is after an epoch whose last batch has one example
        ("elu", ROWS, 3 * ROWS + 1, 4),
    ],
)
def test_a_run_that_is_resumed_is_the_run_without_a_break(name, count, examples, steps, tmp_path):
    data = windows(texts(count), ((3, 0),))[:examples]
    options = {"save_strategy": "steps", "save_steps": steps, **HALVES}
    whole, again = (make(name, torch.float32, dropout=0.1) for _ in range(2))
    again.load_state_dict(whole.state_dict())
    for model, checkpoint in ((whole, False), (again, str(tmp_path / f"checkpoint-{steps}"))):
        run = trainer(model, tmp_path, data, **options)
        run.rows = count
        run.train(resume_from_checkpoint=checkpoint)
    assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_an_update_may_be_shared_in_another_way_after_a_break(tmp_path):
    data, options = windows(texts(2 * ROWS)), {"optim": "sgd", "save_strategy": "steps", "save_steps": 3}
    whole, again = make("elu"), make("elu")
    again.load_state_dict(whole.state_dict())
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    for model, sizes, checkpoint in ((whole, {}, False), (again, parts, str(tmp_path / "checkpoint-3"))):
        run = trainer(model, tmp_path, data, **options, **sizes)
        run.rows = 2 * ROWS
        run.train(resume_from_checkpoint=checkpoint)
    assert_close(again.state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    ("last", "processes", "size", "expected"),
    [
        ([6, 7], 1, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([6, 7], 4, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([6, 7], 2, 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ([6], 1, 2, [[0, 1], [2, 3], [4, 5], [6]]),
        ([6], 2, 2, [[0, 1], [2, 3], [4, 5], [6]]),
        ([6], 1, 4, None),
    ],
)
def test_processes_resume_the_batches_of_others_in_turn(last, processes, size, expected, tmp_path, monkeypatch):
    def process(number: int, count: int, batch: int) -> StatefulTrainer:
        monkeypatch.setattr(TrainingArguments, "process_index", number)
        monkeypatch.setattr(TrainingArguments, "world_size", count)
        run = trainer(make("elu"), tmp_path, [], per_device_train_batch_size=batch)
        run.rows = 8
        return run

    for number, batches in enumerate(([[0, 1], [4, 5]], [[2, 3], last])):
        run = process(number, 2, 2)
        run._states, run._empty = deque(torch.tensor(rows) for rows in batches), torch.zeros(1)
        run._save_rng_state(str(tmp_path))
    if expected is None:
        with pytest.raises(ValueError, match="has states of 7 rows, but batches of 4 examples need 8"):
            process(0, processes, size)._load_rng_state(str(tmp_path))
        return
    for number in range(processes):
        run = process(number, processes, size)
        run._load_rng_state(str(tmp_path))
        assert [rows.tolist() for rows in run._states] == expected[number::processes]


def test_mixed_precision_keeps_the_dtypes_of_a_state(tmp_path):
    model = make("local+elu", torch.float32)
    run = trainer(model, tmp_path, windows(texts(), ((2, 1),)), bf16=True)
    run.train()
    assert losses(run).isfinite().all()


def test_examples_without_the_column_are_trained_on_as_ever(tmp_path):
    data = [{"input_ids": example["input_ids"], "labels": example["labels"]} for example in windows(texts())]
    models = make("elu"), make("elu")
    models[1].load_state_dict(models[0].state_dict())
    for model, kind in zip(models, (StatefulTrainer, Trainer), strict=True):
        trainer(model, tmp_path, data, kind).train()
    assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_evaluation_reads_each_example_without_a_past(tmp_path):
    model, data = make("elu"), windows(texts())
    run = trainer(model, tmp_path, data)
    with torch.no_grad():
        expected = torch.stack([model(x["input_ids"][None], labels=x["labels"][None]).loss for x in data]).mean()
    assert run.evaluate(data)["eval_loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("softmax", {}, "needs a state of constant size, but that of SoftmaxAttention grows with every token"),
        ("positions", {}, "needs a model without learned positions, but these end at 80"),
        ("elu", {"train_sampling_strategy": "random"}, 'must be "sequential", but is "random"'),
        ("elu", {"activation_checkpointing": True}, "activation checkpointing is for training without a cache"),
        ("class", {}, "StatefulTrainer trains a LinattnForCausalLM, but the model is a GPT2LMHeadModel"),
        ("multiple", {}, "rows must be a multiple of the examples per update, 4, but is 6"),
        ("rows", {}, "a batch of 2 examples cannot continue one of 4 examples"),
    ],
)
def test_what_cannot_be_continued_is_refused(name, options, message, tmp_path):
    data = windows(texts())
    if name == "rows":
        # after the last batch of 4 one of 2 that would go on
        data, options = data[: ROWS + 2], {"max_steps": 2}
    learned = {"positions": "learned", "max_length": 80} if name == "positions" else {}
    model = make(name if name in MODELS else "elu", **learned)
    if name == "class":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=SIZE["vocab_size"], n_embd=8, n_layer=1, n_head=1))
    run = trainer(model, tmp_path, data, **options)
    run.rows = 6 if name == "multiple" else None
    with pytest.raises(ValueError, match=message):
        run.train()
