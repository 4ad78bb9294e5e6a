"""The notebook runs in a kernel of this very interpreter, its asserts hold, it prints what it was committed with, and a
mistake in any step is found."""

from pathlib import Path

import matplotlib
import nbformat
import pytest
import torch
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

PATH = Path(__file__).parents[2] / "examples" / "four_methods.ipynb"


def notebook() -> nbformat.NotebookNode:
    return nbformat.read(PATH, as_version=4)


def client(book: nbformat.NotebookNode) -> NotebookClient:
    # without folders of specifications there is one kernel: ipykernel's own, of the interpreter that runs this
    specifications = KernelSpecManager(kernel_dirs=[])
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specifications)
    return NotebookClient(book, km=kernel, timeout=120, resources={"metadata": {"path": str(PATH.parents[1])}})


def printed(book: nbformat.NotebookNode) -> list[str]:
    return ["".join(part.text for part in cell.get("outputs", []) if "text" in part) for cell in book.cells]


@pytest.fixture
def jupyter(tmp_path, monkeypatch):
    """What Jupyter writes about its connections goes into a folder of this test."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MPLBACKEND", raising=False)


def test_it_runs_and_prints_what_it_shows(jupyter):
    book = notebook()
    shown = printed(book)
    client(book).execute()
    assert printed(book) == shown
    assert any("image/png" in part.get("data", {}) for cell in book.cells for part in cell.get("outputs", []))


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
