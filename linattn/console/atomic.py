"""Atomic writes: files and folders are written under hidden names beside their own, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from linattn.files import atomic_file, flush_to_disk

LEFTOVERS = (".*.partial", ".*.removed", ".*.tmp")
"""The hidden names, of folders and files."""


def partial_name(path: Path) -> Path:
    """Return the name under which a folder is filled."""
    return path.with_name(f".{path.name}.partial")


def removed_name(path: Path) -> Path:
    """Return the name under which something is deleted."""
    return path.with_name(f".{path.name}.removed")


def remove_leftovers(folder: Path) -> None:
    """Delete the files and folders that a killed process was writing or deleting, under temporary names."""
    for leftover in [found for pattern in LEFTOVERS for found in folder.glob(pattern)]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def remove_partial_files(path: Path) -> None:
    """Delete the half-written copies of the file `path` that killed processes left. No process may be writing it."""
    for leftover in path.parent.glob(f".{escape(path.name)}.*.tmp"):
        leftover.unlink()


def write_atomically(path: Path, content: str) -> None:
    """Replace a file so that readers see the old content or the new, even after a crash."""
    with atomic_file(path) as partial:
        partial.write_bytes(content.encode())


def copy_atomically(source: Path, path: Path) -> None:
    with atomic_file(path) as partial:
        shutil.copyfile(source, partial)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `path`, which must not exist, at the end."""
    partial = partial_name(path)
    for leftover in (partial, removed_name(path)):
        shutil.rmtree(leftover, ignore_errors=True)
    with missing_parents(path):
        try:
            partial.mkdir()
            yield partial
            rename_durably(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def missing_parents(path: Path) -> Iterator[None]:
    """Create the parents of the path that do not exist. Those that are empty at the end are removed."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for parent in missing:
            # a folder that is not empty stays
            with suppress(OSError):
                parent.rmdir()


def rename_durably(partial: Path, path: Path) -> None:
    """Flush the contents, then rename: a crash in between must not leave a named folder of empty files."""
    for file in sorted(partial.rglob("*")):
        flush_to_disk(file)
    flush_to_disk(partial)
    os.rename(partial, path)
    flush_to_disk(path.parent)


def remove_atomically(path: Path) -> None:
    """Rename a folder before deleting it, so that no half of it keeps the name."""
    renamed = removed_name(path)
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(path, renamed)
    shutil.rmtree(renamed)
