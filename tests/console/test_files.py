"""The files of a command: those that are named, and those in folders whose names fit, in order."""

import os
from pathlib import Path

import pytest

from linattn.console.errors import CommandError
from linattn.console.files import find_files, output_file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/z.py", "b/a.py", "a.py", "c.txt", "tests/d.py", ".git/e.py", ".hidden.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(tree: Path, *patterns: tuple[str, ...]) -> list[str]:
    return [str(file.relative_to(tree)) for file in find_files([str(tree)], *patterns)]


def test_folders_are_searched_in_order_without_what_is_hidden(tree):
    assert names(tree) == ["a.py", "b/a.py", "b/z.py", "c.txt", "tests/d.py"]


def test_include_and_exclude_choose_names(tree):
    assert names(tree, ("*.py",)) == ["a.py", "b/a.py", "b/z.py", "tests/d.py"]
    assert names(tree, ("*.py",), ("tests", "z.*")) == ["a.py", "b/a.py"]


def test_files_that_are_named_are_taken_as_they_are_named(tree):
    files = [tree / "c.txt", tree / ".hidden.py", tree / "a.py"]
    assert find_files([str(file) for file in files], include=("*.py",)) == files


def test_a_link_back_does_not_go_round_for_ever(tree):
    (tree / "b" / "loop").symlink_to(tree, target_is_directory=True)
    assert "b/loop/a.py" not in names(tree)


def test_no_file_is_an_error(tree):
    with pytest.raises(CommandError, match=r"there is no file or folder .*nowhere"):
        find_files([str(tree / "nowhere")])
    # it would be the folder of the command, where a variable of the shell is not set
    with pytest.raises(CommandError, match="the name of a file or folder is empty"):
        find_files([str(tree), ""])
    with pytest.raises(CommandError, match=r"there are no files that fit --include \*\.c"):
        find_files([str(tree)], include=("*.c",))


@pytest.mark.skipif(os.name == "nt", reason="needs pipes with names")
def test_a_pipe_is_no_file(tree):
    """It would be waited for, and replaced: as root, so would /dev/null."""
    os.mkfifo(tree / "pipe")
    with pytest.raises(CommandError, match=r"pipe must be a file or a folder, but is a pipe or a device"):
        find_files([str(tree / "pipe")])
    with pytest.raises(CommandError, match=r"--out .*pipe is a pipe or a device, but must be a file"):
        output_file(tree / "pipe")


def test_a_link_stays_and_its_file_is_written(tree):
    for name, target in (("link", tree / "a.py"), ("dangling", tree / "new.py")):
        (tree / name).symlink_to(target.name)
        assert output_file(tree / name) == target.resolve()
    assert output_file(Path("new.py")) == Path("new.py")
