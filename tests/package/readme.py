"""Runs the README's examples with an installed linattn, away from this repository: `python -I readme.py README.md`."""

import contextlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# a block of Python, and what it prints if the page says so
EXAMPLE = re.compile(r"^```python\n(.*?)^```(?:(?:\n+[^\n`]*)?\n+```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def main(page: Path, repository: Path) -> None:
    text = page.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names: dict[str, object] = {}
        for code, expected in EXAMPLE.findall(text):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            if expected and printed.getvalue() != expected:
                sys.exit(f"the page says\n{expected}but this was printed\n{printed.getvalue()}")
        place = Path(sys.modules["linattn"].__file__ or "").resolve()
        if repository in place.parents and repository / "build" not in place.parents:
            sys.exit(f"this linattn is not the installed one, but {place}")
        command = Path(sys.executable).with_name("linattn")
        version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
        if importlib.metadata.version("linattn") not in version:
            sys.exit(f"linattn --version says {version}")
        os.chdir(repository)
    print(f"the examples of {page.name} print what it says, with {place.parent}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(__file__).resolve().parents[2])
