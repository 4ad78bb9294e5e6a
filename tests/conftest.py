"""What holds for every test: one thread, a seed of its own, and uninitialised memory full of NaN."""

import gc
import os
import signal
import zlib
from collections.abc import Generator

# the processes that tests start take one thread too; read when torch is imported, so set before
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# a pool of compiling processes imports torch in each, which takes longer than the few kernels
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# a test never asks a hub for anything
os.environ["HF_HUB_OFFLINE"] = "1"

import jaxtyping
import pytest

# a shell starts what runs in its background with Ctrl-C ignored
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Set torch up where tests run. A process that hands them to others does without: these wait for it to start."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if not torch.accelerator.is_available():
        # it would write down the stack of calls for each kind of device that is not there, which takes as long as a
        # small test
        torch.manual_seed = torch.default_generator.manual_seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose single tests take longest: with them last, other processes would wait for one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import without the garbage collector, which would search a million new objects again and again."""
    gc.disable()
    result = yield
    gc.collect()
    gc.enable()
    return result


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Exempt all that was imported until now from the garbage collector: transformers' Trainer collects after every
    run, and a search of a million objects takes longer than a tiny run."""
    gc.freeze()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The same for the same test, whichever tests run before it."""
    import torch

    number = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(number)
    return number


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users run it: annotations are not checked, so that a wrong call meets our own errors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_tokens(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Commands that tests run leave nothing in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield
