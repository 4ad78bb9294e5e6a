"""What was read once and kept in a file is what the model would have read itself."""

import io
import shutil
from types import SimpleNamespace

import pytest
import torch

from linattn.cli import read
from linattn.cli.main import main
from linattn.models import LanguageModel
from linattn.states import describe_state, load_state, save_state
from tests.states.test_rows import assert_same

GREEDY = ("--temperature", "0", "--max-new-tokens", "20")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(read, "PIECE", 100)
    monkeypatch.setattr(read, "BLOCK", 250)


def reads(finished, *arguments):
    return main(["read", str(finished), *map(str, arguments)])


def tokens(*paths):
    return [token for path in paths for token in (256, *path.read_bytes())]


def assert_is_state_after(finished, path, expected):
    model = LanguageModel.load(finished)
    with torch.inference_mode():
        _, state = model.extend(torch.tensor([expected]))
    assert_same(load_state(path, model=model), state, rtol=1e-4, atol=1e-4)
    assert describe_state(path).num_tokens == len(expected)


def test_the_state_is_that_of_the_files(finished, text, tmp_path, capsys):
    out = tmp_path / "both.state"
    assert reads(finished, text, "--out", out) == 0
    both = tokens(text / "a.txt", text / "b.txt")
    assert_is_state_after(finished, out, both)
    assert f"{len(both):,} tokens" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["both.state"]


def test_generation_goes_on_from_it(finished, text, tmp_path, capsys):
    out = tmp_path / "a.state"
    reads(finished, text / "a.txt", "--out", out)
    whole = (text / "a.txt").read_text("utf-8") + "the cat"
    capsys.readouterr()
    assert main(["generate", str(finished), "--state", str(out), "--prompt", "the cat", *GREEDY]) == 0
    short = capsys.readouterr().out
    assert main(["generate", str(finished), "--prompt", whole, *GREEDY]) == 0
    assert capsys.readouterr().out == whole.removesuffix("the cat") + short


def test_stdin_and_an_older_state(finished, text, tmp_path, monkeypatch):
    first, second = tmp_path / "a.state", tmp_path / "b.state"
    reads(finished, text / "a.txt", "--out", first)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO((text / "b.txt").read_bytes())))
    assert reads(finished, "-", "--out", second, "--state", first) == 0
    assert_is_state_after(finished, second, tokens(text / "a.txt", text / "b.txt"))


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_reading_goes_on_where_it_was(finished, text, tmp_path, monkeypatch, capsys, begun):
    """Once at Ctrl-C, once while it passes over what was read before, and once at a kill, after which the last state
    that was saved serves."""
    out, older = tmp_path / "b.state", tmp_path / "a.state"
    reads(finished, text / "a.txt", "--out", older)
    arguments = (text / "b.txt", "--out", out, *(("--state", older) if begun else ()))
    counts, extend = [], read.Reading._extend

    def interrupted(self, part):
        if len(counts) == stop:
            raise error
        counts.append(len(part))
        extend(self, part)

    def interrupted_later(self, part):
        if self.place.num_tokens > 50:
            raise KeyboardInterrupt
        skip(self, part)

    skip = read.Reading._skip
    monkeypatch.setattr(read.Reading, "_extend", interrupted)
    monkeypatch.setattr(read, "SAVED", 0.0)
    stop, error = 3, KeyboardInterrupt
    assert reads(finished, *arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(read.Reading, "_skip", interrupted_later)
        assert reads(finished, *arguments) == 130
    stop, error = 6, ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        reads(finished, *arguments)
    assert not out.exists()
    # what a kill in the middle of a write leaves
    for name in (".b.state.7.tmp", "..b.state.unfinished.7.tmp"):
        (tmp_path / name).touch()
    stop = 10**9
    assert reads(finished, *arguments) == 0
    expected = tokens(text / "b.txt")
    assert sum(counts) == len(expected)
    assert_is_state_after(finished, out, tokens(text / "a.txt") + expected if begun else expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.state", "b.state"]


def test_an_interrupted_replacement_goes_on_without_replace(finished, text, tmp_path, monkeypatch, capsys):
    out, extend = tmp_path / "x.state", read.Reading._extend
    reads(finished, text / "a.txt", "--out", out)
    before = out.read_bytes()

    def interrupted(self, part):
        if self.place.num_tokens > 300:
            raise KeyboardInterrupt
        extend(self, part)

    with monkeypatch.context() as patch:
        patch.setattr(read.Reading, "_extend", interrupted)
        assert reads(finished, text / "b.txt", "--out", out, "--replace") == 130
    assert "the same command, without --replace, goes on" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert reads(finished, text / "a.txt", "--out", out) == 2
    assert "of other texts" in capsys.readouterr().err
    assert reads(finished, text / "b.txt", "--out", out) == 0
    assert_is_state_after(finished, out, tokens(text / "b.txt"))
    assert reads(finished, text / "b.txt", "--out", out) == 2


def test_what_an_interruption_left_serves_the_same_texts_only(finished, text, tmp_path, monkeypatch, capsys):
    out, other = tmp_path / "x.state", tmp_path / "other.txt"
    reads(finished, text / "a.txt", "--out", out)
    older = tmp_path / "older.state"
    left = tmp_path / ".x.state.unfinished"
    shutil.move(out, left)
    shutil.copy(left, older)
    content = (text / "a.txt").read_bytes()
    for changed, message in ((b"X" + content[1:], "of other texts"), (content[:-1], "of a longer reading")):
        other.write_bytes(changed)
        assert reads(finished, other, "--out", out) == 2
        assert message in capsys.readouterr().err
    assert reads(finished, text / "a.txt", "--out", out, "--state", older) == 2
    assert "began with another state" in capsys.readouterr().err
    assert left.exists() and not out.exists()
    assert reads(finished, other, "--out", out, "--replace") == 0
    assert not left.exists()


def test_what_is_refused(finished, text, tmp_path, capsys):
    out = tmp_path / "a.state"
    reads(finished, text / "a.txt", "--out", out)
    before = out.read_bytes()
    (tmp_path / "empty.txt").touch()
    for arguments, message in (
        (("read", finished, text, "--out", out), "there is a file"),
        (("read", finished, text, "--out", tmp_path), "is a folder, but must be a file"),
        (("read", finished, tmp_path, "--out", out, "--replace"), "a.state is among the texts"),
        (("read", finished, tmp_path / "none.txt", "--out", tmp_path / "b"), "there is no file or folder"),
        (("read", finished, tmp_path / "empty.txt", "--out", tmp_path / "b"), "the texts are empty"),
        (("read", finished, text, "--out", tmp_path / "b", "--state", text / "a.txt"), "cannot be used"),
        (("generate", finished, "--state", out), "needs a --prompt"),
        (("generate", finished, "--state", text / "a.txt", "--prompt", "a"), "cannot be used"),
        (("generate", finished, "--state", tmp_path / "none", "--prompt", "a"), "no state in"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        assert message in capsys.readouterr().err
    assert out.read_bytes() == before and not (tmp_path / "b").exists()


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("read", "a.txt", "--out", "b"), ("serve",)])
def test_the_states_of_two_texts_are_no_past(finished, text, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(text)
    model, name = LanguageModel.load(finished), tmp_path / "two.state"
    save_state(model.extend(torch.tensor([[1, 2], [3, 4]]))[1], name, model=model)
    assert main([command[0], str(finished), *command[1:], "--state", str(name), "--cpu"]) == 2
    assert capsys.readouterr().err.endswith(f"the state cannot be used: {name} has those of 2 texts, not of one\n")
