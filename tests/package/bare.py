"""Tries linattn where nothing but what it requires is installed, without any extra: `python -I bare.py`.

Every public module imports or names the extra that it needs, models run, and every command helps and says in one line
what to install."""

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

import linattn
from linattn import states
from linattn.cli.main import COMMANDS, main
from linattn.models.storage import read_tensors

# all others work
NEEDING = {"linattn.linearize": "transformers", "linattn.integrations.transformers": "transformers"}


def public_modules() -> Iterator[str]:
    """Yield the modules that list public names."""
    package = Path(linattn.__file__ or "").parent
    for file in sorted(package.rglob("*.py")):
        if "\n__all__ = " in file.read_text("utf-8"):
            yield ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def refusal(module: str) -> str:
    """Return why the module cannot be imported, or an empty string."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        return str(error)
    return ""


def command(*arguments: str) -> tuple[object, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            status: object = main(arguments)
        except SystemExit as exit:
            status = exit.code
    return status, output.getvalue(), error.getvalue()


def try_modules() -> None:
    modules = list(public_modules())
    assert {"linattn", "linattn.models", *NEEDING} <= set(modules), modules
    for name in modules:
        extra = f'pip install "linattn[{NEEDING[name]}]"' if name in NEEDING else ""
        assert extra in (reason := refusal(name)) and bool(extra) == bool(reason), f"{name}: {reason}"


def try_models(folder: Path) -> None:
    model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=7, dim=8, depth=1, num_heads=2, window=2))
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 7)
    assert linattn.MultiheadAttention(8, 2, "elu")(torch.zeros(1, 5, 8)).shape == (1, 5, 8)
    state = model.extend(torch.zeros(1, 5, dtype=torch.long))[1]
    file = folder / "state"
    uses = (
        lambda: model.save(folder / "model"),
        lambda: read_tensors(folder, {}),
        lambda: states.save_state(state, file, model=model),
        lambda: states.load_state(file, model=model),
    )
    for use in uses:
        try:
            use()
        except ModuleNotFoundError as error:
            assert 'pip install "linattn[models]"' in str(error), error
        else:
            raise AssertionError("there is safetensors, which should not be here")


def try_commands(folder: Path) -> None:
    for arguments in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
        status, output, error = command(*arguments)
        assert (status, error) == (0, "") and output, (arguments, status, error)
    run, text = folder / "run", folder / "text"
    run.mkdir()
    (run / "run.json").write_text('{"format": 1}')
    text.write_text(100 * "text")
    needing = [
        ["train", str(text), "--out", str(folder / "new")],
        ["train", str(text), "--out", str(folder / "new"), "--tokenizer", str(text)],
        ["train", "--resume", "--out", str(run)],
        ["generate", str(run)],
        ["read", str(run), str(text), "--out", str(folder / "new")],
        ["serve", str(run)],
        ["info", str(run)],
        ["linearize", "model", "--data", str(text), "--out", str(folder / "new")],
        ["bench", "--out", str(folder / "new")],
    ]
    assert {name for name, *_ in needing} == set(COMMANDS)
    for arguments in needing:
        status, _, error = command(*arguments)
        assert status == 2 and error.count("\n") == 1, (arguments, status, error)
        extra = f'pip install "linattn[{"serve" if arguments[0] == "serve" else "cli"}]"'
        assert error.startswith(f"linattn {arguments[0]}: ") and extra in error, error


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        try_modules()
        try_models(Path(name))
        try_commands(Path(name))
        left = sorted(path.name for path in Path(name).iterdir())
        assert left == ["run", "text"], f"commands that could not run have left files: {left}"
    print(f"without its extras, linattn works or says what to install, with Python {sys.version.split()[0]}")
