"""The notebooks run in a kernel of this very interpreter, their asserts hold, they print what they were committed with,
and a mistake in any step of the first is found."""

from pathlib import Path

import matplotlib
import nbformat
import pytest
import torch
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.ipynb"))
# how long its training takes, and what a model writes then, differs from machine to machine
VARYING = {"language_model"}
# sizes at which the asserts hold too, in half the time
SMALLER = {
    "own_model": {"LENGTH, CLASSES = 128": "LENGTH, CLASSES = 64", "[256, 512, 1024, 2048, 4096]": "[256, 512]"},
    "language_model": {"--steps 60": "--steps 6"},
}


def notebook(name: str = "four_methods") -> nbformat.NotebookNode:
    return nbformat.read(ROOT / f"docs/tutorials/{name}.ipynb", as_version=4)


def client(book: nbformat.NotebookNode) -> NotebookClient:
    # without folders of specifications there is one kernel: ipykernel's own, of the interpreter that runs this
    specifications = KernelSpecManager(kernel_dirs=[])
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specifications)
    return NotebookClient(book, km=kernel, timeout=300, resources={"metadata": {"path": str(ROOT)}})


def printed(book: nbformat.NotebookNode) -> list[str]:
    return ["".join(part.text for part in cell.get("outputs", []) if "text" in part) for cell in book.cells]


@pytest.mark.parametrize("name", TUTORIALS)
def test_progress_is_shown_as_it_ends(name):
    """A browser cannot overwrite a line, as a terminal does: it would show every step of a progress bar."""
    assert not any("\r" in text for text in printed(notebook(name)))


@pytest.fixture
def jupyter(tmp_path, monkeypatch):
    """What Jupyter writes about its connections goes into a folder of this test."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MPLBACKEND", raising=False)


@pytest.mark.parametrize("name", TUTORIALS)
def test_it_runs_and_prints_what_it_shows(name, jupyter):
    book = notebook(name)
    shown = printed(book)
    assert any(shown)
    for old, new in SMALLER.get(name, {}).items():
        (cell,) = (cell for cell in book.cells if cell.cell_type == "code" and old in cell.source)
        cell.source = cell.source.replace(old, new)
    client(book).execute()
    if name not in VARYING:
        assert printed(book) == shown
        assert any("image/png" in part.get("data", {}) for cell in book.cells for part in cell.get("outputs", []))


@pytest.mark.parametrize("name", TUTORIALS)
def test_it_shows_no_warnings_and_no_folders_of_the_machine_it_ran_on(name):
    parts = [part for cell in notebook(name).cells for part in cell.get("outputs", [])]
    assert not [part for part in parts if part.get("name") == "stderr"]
    assert not [part for part in parts if "site-packages" in str(part) or "lib/python3" in str(part)]


def source() -> str:
    """All the code as one program, on fewer tokens, for which no kernel need start."""
    code = "\n\n\n".join(cell.source for cell in notebook().cells if cell.cell_type == "code")
    return code.replace("1000", "200").replace("500", "100")


@pytest.fixture
def run(monkeypatch):
    matplotlib.use("Agg")
    yield lambda code: exec(code, {})
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def test_a_failed_assert_fails_the_run(jupyter):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        client(book).execute()


def test_its_asserts_hold_for_other_lengths_too(run):
    run(source())


MISTAKES = {
    "softmax without its scale": ("scores = Q @ K.T / math.sqrt(dk)", "scores = Q @ K.T"),
    "softmax over the queries": ("exponentials.sum(dim=-1, keepdim=True)", "exponentials.sum(dim=-2, keepdim=True)"),
    "softmax of the keys over channels": ("sigma_k = K.softmax(dim=-2)", "sigma_k = K.softmax(dim=-1)"),
    "softmax of the keys over the batch": ("(K.softmax(dim=-2).mT @ V)", "(K.softmax(dim=0).mT @ V)"),
    "queries where keys belong": ("context = sigma_k.T @ V", "context = sigma_q.T @ V"),
    "another feature map": ("return elu(x) + 1", "return elu(x) + 1.001"),
    "no denominator": ("output = numerator / denominator[:, None]", "output = numerator / N"),
    "vectors of any length": (
        "K_prime = K / torch.linalg.vector_norm(K, dim=-1, keepdim=True)\nshow",
        "K_prime = K\nshow",
    ),
    "a sign": ("denominator = N + Q_prime @ K_sum", "denominator = N - Q_prime @ K_sum"),
    "one projection for both": ("FV = F @ V", "FV = E @ V"),
    "a batch that mixes": ("softmax_attention(Q, E_ @ K, F_ @ V)", "softmax_attention(Q, E_ @ K, (F_ @ V).flip(0))"),
}


@pytest.mark.parametrize(("right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_any_step_is_found(run, right, wrong):
    assert source().count(right) == 1
    with pytest.raises(AssertionError):
        run(source().replace(right, wrong))
