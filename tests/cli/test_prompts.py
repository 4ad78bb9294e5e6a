"""A line for each prompt of a file, with the text that the command writes for the prompt alone."""

import json
import os
import signal

import pytest

from linattn.cli import prompts
from linattn.cli.main import main
from linattn.cli.prompts import Answer, Job
from linattn.cli.vocabulary import Tokenizer
from linattn.generation import ContinuousBatch
from tests.processes import run_in_another

LINES = [
    {"prompt": "the cat", "seed": 1},
    {"prompt": "", "temperature": 0, "id": "greedy"},
    {"prompt": "a dog sees över", "max_new_tokens": 31, "top_k": 3, "seed": 2, "id": 7},
    {"prompt": "the hill and the tree", "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.1, "stop": "e"},
    {"prompt": "runs", "seed": 5, "max_new_tokens": 3},
]
COMMAND = ("--seed", "3", "--max-new-tokens", "12")


def write(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


def command(finished, path, out, *more):
    return ["generate", str(finished), "--prompts", str(path), "--out", str(out), *COMMAND, *map(str, more)]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "prompts.jsonl", LINES)


@pytest.fixture(scope="module")
def complete(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("complete")
    path = write(folder / "prompts.jsonl", LINES)
    assert main(command(finished, path, folder / "out.jsonl")) == 0
    return (folder / "out.jsonl").read_bytes()


def alone(capsys, finished, line, *more):
    """The text that the command writes for this prompt, and the number of tokens."""
    options = {"seed": 3, "max_new_tokens": 12} | {name: value for name, value in line.items() if name != "id"}
    arguments = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    capsys.readouterr()
    assert main(["generate", str(finished), *arguments, *more]) == 0
    captured = capsys.readouterr()
    return captured.out.removeprefix(line["prompt"])[:-1], int(captured.err[1:].split()[0])


def test_each_line_is_what_the_command_writes_alone(finished, complete, capsys):
    results = [json.loads(line) for line in complete.decode().splitlines()]
    assert [result["line"] for result in results] == [1, 2, 3, 4, 5]
    assert [result.get("id") for result in results] == [None, "greedy", 7, None, None]
    for line, result in zip(LINES, results, strict=True):
        assert (result["text"], result["tokens"]) == alone(capsys, finished, line)


def test_a_batch_of_one_and_what_editors_add_change_nothing(finished, path, complete, tmp_path, capsys):
    """Blank lines, the mark of the encoding, and ends of lines as on Windows."""
    out = tmp_path / "new" / "out.jsonl"
    path.write_text(path.read_text("utf-8") + "\n \n", encoding="utf-8-sig", newline="\r\n")
    assert main(command(finished, path, out, "--batch", "1")) == 0
    assert out.read_bytes() == complete
    captured = capsys.readouterr()
    assert captured.out == f"{out}: 5 texts\n" and " tokens/s]" in captured.err
    assert [each.name for each in out.parent.iterdir()] == ["out.jsonl"]


def test_a_link_to_the_texts_stays_a_link(finished, path, complete, tmp_path):
    link, texts = tmp_path / "link", tmp_path / "texts.jsonl"
    link.symlink_to(texts.name)
    assert main(command(finished, path, link)) == 0
    assert link.is_symlink() and texts.read_bytes() == complete


def test_the_end_of_a_prompt_is_no_answer(tokenizer):
    """Where it looks like half a character, it would come with the first new one."""
    vocabulary = Tokenizer(tokenizer)
    answer = Answer(Job(1, {"prompt": "a�"}, "", vocabulary.encode("a�".encode()), {"stop": None}), vocabulary)
    (token,) = vocabulary.encode(b"b")
    answer.extend(token)
    assert json.loads(answer.result())["text"] == "b"


def test_prompts_go_on_from_a_state(finished, text, tmp_path, capsys):
    state, out = tmp_path / "a.state", tmp_path / "out.jsonl"
    assert main(["read", str(finished), str(text / "a.txt"), "--out", str(state)]) == 0
    path = write(tmp_path / "prompts.jsonl", LINES[2:4])
    assert main(command(finished, path, out, "--state", state)) == 0
    results = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    for line, result in zip(LINES[2:4], results, strict=True):
        assert (result["text"], result["tokens"]) == alone(capsys, finished, line, "--state", str(state))
    # it is another request than the one without a state
    assert main(command(finished, path, out)) == 2
    path = write(tmp_path / "prompts.jsonl", LINES[:2])
    assert main(command(finished, path, tmp_path / "other", "--state", state)) == 2
    assert "line 2 of" in capsys.readouterr().err


def test_it_goes_on_wherever_it_was_killed(finished, path, complete, tmp_path, capsys, monkeypatch):
    """After any bytes; only what is missing is generated."""
    out, added = tmp_path / "out.jsonl", []
    step = ContinuousBatch.step
    monkeypatch.setattr(ContinuousBatch, "step", lambda self: added.append(len(self)) or step(self))
    lines = complete.splitlines(keepends=True)
    for order, size in ((lines, 0), (lines[::-1], len(lines[4]) + 1), (lines[::-1], len(complete)), (lines, -1)):
        content = b"".join(order)[: size if size >= 0 else len(complete) - 1]
        out.write_bytes(content)
        added.clear()
        assert main(command(finished, path, out)) == 0
        assert out.read_bytes() == complete
        assert max(added, default=0) == len(LINES) - content.count(b"\n")


def generate_until(count, arguments):
    """Generate, and die after so many lines, in the middle of the next one."""
    result, calls = prompts.Answer.result, []

    def fatal(self):
        calls.append(0)
        if len(calls) > count:
            with open(arguments[5], "ab") as file:
                file.write(result(self).encode()[:9])
            os.kill(os.getpid(), signal.SIGKILL)
        return result(self)

    prompts.Answer.result = fatal
    main(arguments)


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_the_systems_own_kill(finished, path, complete, tmp_path):
    out = tmp_path / "out.jsonl"
    arguments = command(finished, path, out, "--batch", "2")
    assert run_in_another(generate_until, 2, arguments) == -signal.SIGKILL
    assert out.read_bytes().count(b"\n") == 2 and not out.read_bytes().endswith(b"\n")
    assert main(arguments) == 0
    assert out.read_bytes() == complete


def test_ctrl_c_says_how_to_go_on(finished, path, complete, tmp_path, capsys, monkeypatch):
    out, step, calls = tmp_path / "out.jsonl", ContinuousBatch.step, []

    def interrupted(self):
        calls.append(0)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(ContinuousBatch, "step", interrupted)
    for options, same in (((), "the same command"), (("--replace",), "the same command, without --replace,")):
        calls.clear()
        assert main([*command(finished, path, out), *options]) == 130
        assert f"interrupted after 2 of 5 texts: {same} goes on" in capsys.readouterr().err
        assert main(command(finished, path, out)) == 0
        assert out.read_bytes() == complete


def test_more_prompts_are_added_and_others_are_refused(finished, path, complete, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_bytes(complete)
    write(path, [*LINES, LINES[1]])
    assert main(command(finished, path, out)) == 0
    longer = out.read_bytes()
    assert longer.startswith(complete) and longer.count(b"\n") == 6
    write(path, [*LINES[:4], {"prompt": "another"}, LINES[1]])
    for arguments in (command(finished, path, out), command(finished, path, out, "--temperature", "0.5")):
        assert main(arguments) == 2
        assert "is no answer to" in (error := capsys.readouterr().err) and "--replace starts over" in error
    assert out.read_bytes() == longer
    write(path, LINES)
    assert main(command(finished, path, out, "--replace")) == 0
    assert out.read_bytes() == complete
    for other in ("something else\n", '{"name": "something else"}', "notes"):
        out.write_text(other, encoding="utf-8")
        assert main(command(finished, path, out)) == 2
        assert f"line 1 of {out} is no answer to" in capsys.readouterr().err
        assert out.read_text("utf-8") == other


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 6 of prompts.jsonl: "),
        ("{", "line 6 of prompts.jsonl: Invalid JSON"),
        ("{}", "line 6 of prompts.jsonl: prompt"),
        ('{"prompt": 3}', "line 6 of prompts.jsonl: prompt"),
        ('{"prompt": "a", "tokens": 3}', "line 6 of prompts.jsonl: tokens"),
        ('{"prompt": "a", "top_k": 1.5}', "line 6 of prompts.jsonl: top_k"),
        ('{"prompt": "a", "top_p": 2}', "line 6 of prompts.jsonl: top_p must be in (0, 1]"),
        ('{"prompt": "a", "temperature": 0, "top_k": 3}', "line 6 of prompts.jsonl: top_k, top_p and min_p"),
        ('{"prompt": "a", "max_new_tokens": 0}', "line 6 of prompts.jsonl: max_new_tokens"),
        ('{"prompt": "a", "seed": 1e400}', "line 6 of prompts.jsonl: "),
        ('{"prompt": "\\ud800"}', "line 6 of prompts.jsonl: "),
    ],
)
def test_a_broken_line_is_refused_by_its_number(finished, path, tmp_path, capsys, monkeypatch, line, message):
    """Before anything is generated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ContinuousBatch, "step", None)
    path.write_text(path.read_text("utf-8") + line + "\n", encoding="utf-8")
    assert main(command(finished, "prompts.jsonl", "out.jsonl")) == 2
    assert message in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "x"), "--out is for the texts of --prompts"),
        (("--batch", "2"), "--batch is for the texts of --prompts"),
        (("--replace",), "--replace is for the texts of --prompts"),
        (("--prompts", "x", "--prompt", "a", "--out", "y"), "--prompt is one and --prompts are many"),
        (("--prompts", "x"), "--prompts needs --out"),
        (("--prompts", "x", "--out", "y"), "there is no file x"),
        (("--prompts", "empty", "--out", "y"), "there are no prompts in empty"),
        (("--prompts", "empty", "--out", "empty"), "--out must be another file than --prompts"),
        (("--prompts", "empty", "--out", "."), "--out . is a folder, but must be a file"),
    ],
)
def test_options_that_do_not_fit_are_refused(finished, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    assert main(["generate", str(finished), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["empty"]
