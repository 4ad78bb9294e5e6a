"""The command before any of its work: what it says where its packages are missing, and to names that do not exist."""

import json
import subprocess
import sys

import pytest

from linattn.cli.main import COMMANDS, main

# torch and jaxtyping need none of these, so an environment may lack them all
EXTRAS = "numpy,safetensors,transformers,accelerate,tokenizers,huggingface_hub,matplotlib,PIL,rich,tqdm,psutil,yaml"

WITHOUT_EXTRAS = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] in sys.argv[1].split(",") else super().find_spec(name, *arguments)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from linattn.cli.main import main
results = []
for arguments in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    results.append([status, output.getvalue(), error.getvalue()])
print(json.dumps(results))
"""


def test_without_the_extra_it_helps_and_says_what_to_install(finished, text, tmp_path):
    helps = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.touch()
    needing = [
        ["train", str(text), "--out", str(tmp_path / "run")],
        ["train", str(text), "--out", str(tmp_path / "run"), "--tokenizer", str(tokenizer)],
        ["generate", str(finished)],
        ["info", str(finished)],
        ["linearize", "model", "--data", str(text), "--out", str(tmp_path / "linear")],
        ["bench", "--out", str(tmp_path / "bench")],
    ]
    command = [sys.executable, "-c", WITHOUT_EXTRAS, EXTRAS, json.dumps(helps + needing)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for arguments, (status, output, error) in zip(helps, results, strict=False):
        assert (status, error) == (0, "") and output, arguments
    assert {arguments[0] for arguments in needing} == set(COMMANDS)
    for arguments, (status, _, error) in zip(needing, results[len(helps) :], strict=True):
        (line,) = error.splitlines()
        assert status == 2 and line.startswith(f"linattn {arguments[0]}: "), line
        assert "pip install 'linattn[cli]'" in line, line
    assert list(tmp_path.iterdir()) == [tokenizer]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("trian",), "did you mean 'train'?"),
        (("train", "x", "--out", "y", "--num-head"), "did you mean '--num-heads'?"),
        (("train", "x", "--out", "y", "--batch-size=4"), "did you mean '--batch'?"),
        (("train", "x", "--out", "y", "--feed-forward", "gatd"), "did you mean 'gated'?"),
        (("bench", "--workloads", "forwards"), "did you mean 'forward'?"),
        (("bench", "--dtypes", "float23"), "did you mean 'float32'?"),
        (("bench", "--methods", "eluu"), "did you mean 'elu'?"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(capsys, arguments, expected):
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and expected in line, line


def test_a_name_like_none_suggests_none(capsys):
    with pytest.raises(SystemExit):
        main(["train", "x", "--out", "y", "--zzz"])
    assert "did you mean" not in capsys.readouterr().err
