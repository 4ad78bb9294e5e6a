"""Files and folders that appear whole or not at all: written under another name beside their own, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def partial_name(path: Path) -> Path:
    """Where something is written before it gets its name; hidden, so that no listing takes it for finished."""
    return path.with_name(f".{path.name}.partial")


def removed_name(path: Path) -> Path:
    """Where something is while it is deleted."""
    return path.with_name(f".{path.name}.removed")


def remove_leftovers(folder: Path) -> None:
    """Delete what is in the folder under other names, because a kill came before it got or lost its own."""
    for leftover in [*folder.glob(".*.partial"), *folder.glob(".*.removed")]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def write_whole(path: Path, content: str | bytes) -> None:
    """Readers see the old file or the new one, also after a crash."""
    with whole_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_whole(source: Path, path: Path) -> None:
    with whole_file(path) as partial:
        shutil.copyfile(source, partial)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write the file under the name given; it takes the place of `path` at the end."""
    partial = partial_name(path)
    try:
        yield partial
        flush_to_disk(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill the empty folder given; it becomes `path`, which must not exist, at the end."""
    partial = partial_name(path)
    for leftover in (partial, removed_name(path)):
        shutil.rmtree(leftover, ignore_errors=True)
    parents = [parent for parent in path.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        rename_whole(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in parents:
            # those made here hold nothing else, unless somebody was quick
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def rename_whole(partial: Path, path: Path) -> None:
    """The contents first, the name afterwards: a crash between the two must not leave a named folder of empty files."""
    for file in sorted(partial.rglob("*")):
        flush_to_disk(file)
    flush_to_disk(partial)
    os.rename(partial, path)
    flush_to_disk(path.parent)


def remove_whole(path: Path) -> None:
    """A folder that is being deleted loses its name first."""
    condemned = removed_name(path)
    shutil.rmtree(condemned, ignore_errors=True)
    os.rename(path, condemned)
    shutil.rmtree(condemned)


def flush_to_disk(path: Path) -> None:
    # Windows refuses to open folders, and needs no such call for them
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
