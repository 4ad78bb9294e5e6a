"""Text as it is made: what the model's own generation gives, with every option."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from linattn.cli.generate import text as written
from linattn.cli.main import main
from linattn.cli.vocabulary import Bytes, Tokenizer
from linattn.generation import Sampling, generate, stream
from linattn.generation.texts import TextCoder
from linattn.models import LanguageModel
from tests.cli.conftest import SHORT, TINY


def output(capsys: pytest.CaptureFixture, run: Path, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["generate", str(run), *arguments]) == 0
    return capsys.readouterr().out


SEEDED = ("--seed", "1", "--max-new-tokens", "40", "--prompt", "the cat")


def test_it_is_the_models_own_generation(finished, capsys):
    vocabulary = Bytes()
    prompt = [vocabulary.separator, *b"the cat"]
    (new,) = generate(
        LanguageModel.load(finished),
        [prompt],
        max_new_tokens=40,
        sampling=Sampling(temperature=0.8),
        seed=1,
        stop_tokens=(vocabulary.separator,),
    )
    expected = bytes(token for token in new if token != vocabulary.separator).decode("utf-8", "replace")
    assert output(capsys, finished, *SEEDED) == f"the cat{expected}\n"


def test_the_library_generates_from_text(finished, text, tokenizer, tmp_path, capsys):
    """What the command writes, for bytes and words as tokens; the model finds its tokenizer in its folder."""
    words = tmp_path / "words"
    assert (
        main(["train", str(text), "--out", str(words), "--tokenizer", str(tokenizer), *TINY, *SHORT, "--steps", "1"])
        == 0
    )
    options = {"max_new_tokens": 40, "sampling": Sampling(temperature=0.8)}
    for run in (finished, words):
        model = LanguageModel.load(run)
        new = generate(model, "the cat", seed=1, **options)
        assert output(capsys, run, *SEEDED) == f"the cat{new}\n"
        assert generate(model, ["the cat"], seed=1, **options) == [new]
        pieces = list(stream(model, "the cat", seed=1, **options))
        assert "".join(pieces) == new and 5 < len(pieces) <= 40
        rows = list(zip(*stream(model, ["the cat", "a"], seed=1, **options), strict=True))
        texts = ["".join(piece for piece in row if piece is not None) for row in rows]
        assert texts == generate(model, ["the cat", "a"], seed=1, **options)
        assert [type(each) for each in generate(model, ["the cat", "a"], **options)] == [str, str]
        _, state = generate(model, ["the cat"], max_new_tokens=5, return_state=True)
        tokens = Tokenizer(run / "tokenizer.json").encode(b"a") if run == words else b"a"
        expected = generate(model, list(tokens), max_new_tokens=5, state=state)
        assert generate(model, "a", max_new_tokens=5, state=state) == TextCoder(model).decode(expected, tokens)
    with pytest.raises(ValueError, match=r"stop_tokens must be tokens, \(2,\) for a single one, but are 5"):
        generate(model, "the cat", max_new_tokens=5, stop_tokens=5)
    model.tokenizer_file = None
    with pytest.raises(ValueError, match="no tokenizer"):
        generate(model, "the cat", max_new_tokens=5)


def test_the_settings_of_a_batch_cut_and_fill_no_text(finished, tokenizer, tmp_path):
    backend = Backend.from_file(str(tokenizer))
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    backend.save(str(tmp_path / "tokenizer.json"))
    model = LanguageModel.load(finished)
    model.tokenizer_file = tmp_path / "tokenizer.json"
    (found,) = TextCoder(model).encode(["the cat sat on a mat"], begins=False)
    assert found == Tokenizer(tokenizer).encode(b"the cat sat on a mat")


def test_the_same_seed_writes_the_same(finished, capsys):
    assert output(capsys, finished, *SEEDED) == output(capsys, finished, *SEEDED)


def test_every_option_has_an_effect(finished, capsys):
    plain = output(capsys, finished, *SEEDED)
    for option in (
        ("--seed", "2"),
        ("--max-new-tokens", "20"),
        ("--prompt", "the dog"),
        ("--temperature", "0"),
        ("--top-k", "2"),
        ("--top-p", "0.1"),
        ("--min-p", "0.9"),
        ("--repetition-penalty", "1e-6"),
        ("--stop", "\ufffd"),
    ):
        assert output(capsys, finished, *SEEDED, *option) != plain, option


def test_a_gpu_is_left_alone(finished, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    moved = []
    monkeypatch.setattr(LanguageModel, "cuda", lambda self: moved.append(1) or self)
    output(capsys, finished, *SEEDED, "--cpu")
    assert not moved
    output(capsys, finished, *SEEDED)
    assert moved


def test_a_prompt_comes_from_stdin(finished, capsys, monkeypatch):
    expected = output(capsys, finished, *SEEDED)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat")))
    assert output(capsys, finished, *SEEDED, "--prompt", "-") == expected


def test_no_prompt_is_the_beginning_of_a_document(finished, capsys):
    assert len(output(capsys, finished, "--max-new-tokens", "20")) > 1


def test_the_speed_is_told_apart_from_the_text(finished, capsys):
    assert main(["generate", str(finished), *SEEDED]) == 0
    error = capsys.readouterr().err
    assert error.startswith("[40 tokens, ") and " tokens/s after " in error
    assert main(["generate", str(finished), "--max-new-tokens", "0"]) == 0
    assert capsys.readouterr().err == "[0 tokens]\n"


def test_text_of_a_tokenizer(text, tokenizer, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(text), "--out", str(run), *TINY, *SHORT, "--tokenizer", str(tokenizer)]) == 0
    vocabulary = Tokenizer(tokenizer)
    prompt = [vocabulary.separator, *vocabulary.encode("över".encode())]
    (new,) = generate(LanguageModel.load(run), [prompt], max_new_tokens=5)
    expected = vocabulary.backend.decode([*prompt[1:], *new])
    written = output(capsys, run, "--prompt", "över", "--max-new-tokens", "5", "--temperature", "0")
    assert written.rstrip("\n") == expected.rstrip("\ufffd\n")


def bytewise(*pieces: bytes):
    return (byte for piece in pieces for byte in piece)


def test_pieces_come_as_soon_as_they_are_certain():
    given = []

    def tokens():
        for byte in "aé€b".encode():
            given.append(byte)
            yield byte

    pieces = written(Bytes(), b"", tokens(), None)
    assert next(pieces) == ""
    assert (next(pieces), len(given)) == ("a", 1)
    assert (next(pieces), len(given)) == ("", 2)
    assert (next(pieces), len(given)) == ("é", 3)


@pytest.mark.parametrize("end", [b"", b" more"])
@pytest.mark.parametrize(
    "stop, expected",
    [
        ("END", "one EN two E"),
        ("zzz", None),
        ("one", ""),
        ("E", "one "),
        ("o E", "one EN tw"),
        ("EEN", "one EN two "),
        ("\n", None),
    ],
)
def test_text_ends_before_the_stop_text(end, stop, expected):
    everything = b"one EN two EEND three" + end
    pieces = list(written(Bytes(), b"E", bytewise(everything), stop))
    assert "".join(pieces) == "E" + (everything.decode() if expected is None else expected)


def test_a_stop_text_in_the_prompt_stops_nothing():
    assert "".join(written(Bytes(), b"END", bytewise(b"x"), "END")) == "ENDx"
    # nor does one that begins there
    assert "".join(written(Bytes(), b"EN", bytewise(b"D"), "END")) == "END"


def test_half_a_character_at_the_end_is_shown():
    assert "".join(written(Bytes(), b"", bytewise(b"a\xe2\x82"), None)) == "a\ufffd"


def test_it_needs_no_transformers(finished):
    code = (
        "import sys; from linattn.cli.main import main; "
        f"assert main(['generate', {str(finished)!r}, '--max-new-tokens', '5']) == 0; "
        "assert main(['info', sys.argv[1]]) == 0; "
        "assert not {'transformers', 'accelerate', 'matplotlib', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(finished)], check=True, capture_output=True)


def test_a_reader_that_leaves_is_no_error(finished):
    command = [sys.executable, "-m", "linattn.cli", "generate", str(finished), "--max-new-tokens", "3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == 0
    assert b"rror" not in error
