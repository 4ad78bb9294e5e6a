"""Collected where kernels can run: see ../test_kernels.py."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    # each call inside a kernel would prepare the language once more, which takes half of the time: a kernel prepares
    # both of its modules, and the calls inside it find them ready
    prepare, both = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: prepare(both)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    # each access to memory would build a table of all dtypes; pointers, which have no hash, do without it
    dtype, cached = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda x: dtype(x) if x.scalar.is_ptr() else cached(x.scalar)
    # and no number at these sizes leaves 32 bits, which would be checked at every addition
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    rewritten = config.getoption("jaxtyping_packages", default=None)
    return True if rewritten or not (INTERPRETED or CUDA) else None


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture
def in_splits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cut sequences into splits of so many tokens, or of a chunk, as on a device with many processors and few rows."""
    from linattn.ops.triton import launch
    from linattn.ops.triton.tiling import Split

    def cut(length: int) -> None:
        def split(n: int, programs: int, chunk: int, device: torch.device) -> Split:
            whole = -(-length // chunk) * chunk
            return Split(whole, max(1, -(-n // whole)))

        monkeypatch.setattr(launch, "split", split)

    return cut
