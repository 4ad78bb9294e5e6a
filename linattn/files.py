"""Files that are whole or not there, and files of tensors."""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from linattn.checks import extra


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside the path, on the same disk. Its file takes the path's name once it is on the disk."""
    temporary = _temporary(path)
    try:
        yield temporary
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """Return a hidden name beside the path that no other thread or process has."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


def flush_to_disk(path: Path) -> None:
    windows = os.name == "nt"
    if path.is_dir() and windows:
        return  # Windows has no descriptor of a folder
    # Windows flushes only what is open for writing
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def safetensors_library() -> Any:
    """Import safetensors, which writes with numpy. Raise MissingPackage without either."""
    with extra("models"):
        import numpy  # noqa: F401
        import safetensors.torch
    return safetensors


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a file of safetensors with the mode of any new file. Raises OSError if it cannot be written."""
    library = safetensors_library()
    try:
        library.torch.save_file(tensors, path, metadata=metadata)
    except library.SafetensorError as error:
        raise OSError(f"{path.name} could not be written to {path.parent}: {error}") from error
    set_default_mode(path)


def set_default_mode(file: Path) -> None:
    """Give a file the mode of any new file. safetensors, and so transformers, lets only the owner read its files."""
    new = _temporary(file)
    try:
        new.touch()
        file.chmod(stat.S_IMODE(new.stat().st_mode))
    finally:
        new.unlink(missing_ok=True)
