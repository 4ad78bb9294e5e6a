"""The files of a command line: those of data, which are searched for, and the one that is written."""

import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path

from linattn.console.errors import CommandError


def find_files(paths: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Path]:
    """Return the named files and all files in the named folders, sorted. In folders, names that begin with a dot are
    skipped; `include` applies to files there, `exclude` to files and folders."""
    files: list[Path] = []
    if "" in paths:
        raise CommandError("the name of a file or folder is empty")
    for path in map(Path, paths):
        if not path.exists():
            raise CommandError(f"there is no file or folder {path}")
        if not (path.is_file() or path.is_dir()):
            raise CommandError(f"{path} must be a file or a folder, but is a pipe or a device")
        files += [path] if path.is_file() else _files_in(path, include, exclude)
    if not files:
        patterns = f" that fit --include {' '.join(include)}" if include else ""
        raise CommandError(f"there are no files{patterns} in {', '.join(paths)}")
    return files


def _files_in(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if _fits(entry.name, (".*", *exclude)):
            continue
        # a link to a folder may lead back to where it is
        if entry.is_dir() and not entry.is_symlink():
            yield from _files_in(entry, include, exclude)
        elif entry.is_file() and _fits(entry.name, include or ("*",)):
            yield entry


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def output_file(path: Path) -> Path:
    """Return the file that is written where --out is `path`: behind a link, the file that it leads to. Raise
    CommandError if anything else is there."""
    if path.exists() and not path.is_file():
        raise CommandError(
            f"--out {path} is {'a folder' if path.is_dir() else 'a pipe or a device'}, but must be a file"
        )
    return path.resolve() if path.is_symlink() else path
