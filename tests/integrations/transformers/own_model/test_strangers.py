"""What a program can do with a saved folder that never imports linattn itself, only transformers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer

from linattn.integrations.transformers import byte_tokenizer
from linattn.models import LanguageModel

from .models import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of bytes with its tokenizer, as `linattn train` leaves it."""
    folder = tmp_path_factory.mktemp("run") / "model"
    make("local+elu", torch.float32, vocab_size=257).model.save(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def alone(program: str, *arguments: object, home: Path) -> dict[str, object]:
    """Run a program in a process of its own; it prints one line of JSON last."""
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[4])}
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_every_auto_class_and_a_pipeline_load_a_folder(folder, tmp_path):
    found = alone(
        """
import json, sys, torch, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    refusal = str(error)
assert not any(name.startswith("linattn") for name in sys.modules)
torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
kinds = ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"]
models = [getattr(transformers, kind).from_pretrained(sys.argv[1], trust_remote_code=True) for kind in kinds]
tokens = torch.arange(12).reshape(2, 6)
models[1].save_pretrained(sys.argv[2])
assert all(weight.isfinite().all() for model in models for weight in model.state_dict().values())
pipe = transformers.pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
text = pipe("Grüße ", max_new_tokens=5, do_sample=False, return_full_text=True)[0]["generated_text"]
classes, logits = [type(model).__name__ for model in models], models[1](tokens).logits.tolist()
print(json.dumps({"refusal": refusal, "classes": classes, "logits": logits, "text": text}))
""",
        folder,
        tmp_path / "again",
        home=tmp_path,
    )
    assert "trust_remote_code=True" in found["refusal"]
    assert found["classes"] == [
        "LinattnModel",
        "LinattnForCausalLM",
        "LinattnForSequenceClassification",
        "LinattnForTokenClassification",
    ]
    assert_close(torch.tensor(found["logits"]), LanguageModel.load(folder)(torch.arange(12).reshape(2, 6)))
    # what transformers saves again has our file, and no copy of our source
    assert sorted(path.name for path in (tmp_path / "again").glob("*.py")) == ["linattn_classes.py"]
    assert (tmp_path / "again/linattn_classes.py").read_text() == (folder / "linattn_classes.py").read_text()
    model, tokenizer = LanguageModel.load(folder), byte_tokenizer()
    tokens = tokenizer("Grüße ", return_tensors="pt").input_ids
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert found["text"] == tokenizer.decode(tokens[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "  two  spaces\n\tand , commas .",
        "Grüße, 世界 \U0001f600\u200d\ufeff",
        "\x00\x1f\x7f",
        "<|document|> <0x41> </s>",
        "e\u0301 é \u1e9b\u0323",
    ],
)
def test_every_text_comes_back(text, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens == [*text.encode("utf-8")]
    assert tokenizer.decode(tokens) == text
    assert tokenizer(text).input_ids == [256, *tokens]


def test_every_byte_string_comes_back(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (bytes(range(256)), b"\xff\xfe", "ü".encode()[:1], torch.randint(256, (500,)).byte().numpy().tobytes()):
        names = tokenizer.convert_ids_to_tokens([*text])
        assert bytes(tokenizer.convert_tokens_to_ids(names)) == text
        assert tokenizer.decode([*text]) == text.decode("utf-8", "replace")
    assert len(tokenizer) == 257


def test_padding_goes_to_the_left(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["a", "abc"], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    model = make("elu", torch.float32, vocab_size=257)
    short = model(tokenizer("a", return_tensors="pt").input_ids).logits
    assert_close(model(batch.input_ids, attention_mask=batch.attention_mask).logits[0, 2:], short[0])


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


@pytest.mark.slow
def test_lm_eval_measures_the_bits_of_our_own_logits(folder, tmp_path):
    texts = ["Grüße an alle.", "one two three four"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("DATA", json.dumps(str(tmp_path / "data.jsonl"))))
    found = alone(
        """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, here = sys.argv[1:]
model = f"pretrained={folder},trust_remote_code=True,add_bos_token=False"
# without the thousands of tasks that it brings
tasks = TaskManager(include_path=here, include_defaults=False)
found = simple_evaluate("hf", model, ["tiny"], device="cpu", task_manager=tasks)
assert not any(name.startswith("linattn.cli") for name in sys.modules)
print(json.dumps(found["results"]["tiny"]))
""",
        folder,
        tmp_path,
        home=tmp_path,
    )
    model, bits = LanguageModel.load(folder), 0.0
    for text in texts:
        tokens = torch.tensor([[256, *text.encode()]])
        chosen = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1))
        bits -= chosen.sum().item() / math.log(2)
    assert found["bits_per_byte,none"] == pytest.approx(bits / sum(len(text.encode()) for text in texts), rel=1e-5)
