"""What `import linattn` loads. What it costs is measured by benchmarks/import_time.py."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# what only some of the extras need, and so must not be loaded for everyone
OTHERS = ["triton", "transformers", "safetensors", "accelerate", "tokenizers", "peft", "matplotlib", "tqdm", "argparse"]


def modules(statement: str) -> set[str]:
    """Names of the packages that a new process has loaded after the statement."""
    program = f"import json, sys\n{statement}\nprint(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def added() -> set[str]:
    return modules("import linattn") - modules("import torch")


@pytest.mark.parametrize("name", OTHERS)
def test_import_leaves_out(added, name):
    assert name not in added


def test_import_leaves_out_the_command_line():
    program = "import linattn, sys; print([name for name in sys.modules if name.startswith('linattn.')])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "linattn.cli" not in loaded
    assert "linattn.integrations.transformers" not in loaded


def test_public_names_are_listed_and_there():
    import linattn

    missing = [name for name in linattn.__all__ if not hasattr(linattn, name)]
    assert not missing
    assert len(set(linattn.__all__)) == len(linattn.__all__)


def test_an_older_transformers_is_refused_by_name():
    """Its models take caches by other names, so states would be read wrongly or not at all."""
    from linattn.integrations.transformers import OLDEST

    major, minor = OLDEST.split(".")
    program = f"import transformers; transformers.__version__ = '{major}.{int(minor) - 1}.9'\n"
    program += "import linattn.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: linattn needs transformers {OLDEST} or later, but ")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"transformers>={OLDEST}" in project["optional-dependencies"]["transformers"]
