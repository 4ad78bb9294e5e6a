"""Whole or not at all."""

import pytest

from linattn.console.atomic import atomic_file, atomic_folder, copy_atomically, remove_atomically, write_atomically


def test_a_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with atomic_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    copy_atomically(path, tmp_path / "copy")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy", "file"]


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(OSError, match="full"), atomic_file(path) as partial:
        partial.write_text("ne")
        raise OSError("full")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_a_folder_appears_at_the_end(tmp_path):
    path = tmp_path / "new" / "deep" / "folder"
    with atomic_folder(path) as partial:
        (partial / "file").write_text("x")
        assert not path.exists()
    assert (path / "file").read_text() == "x"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_folder_that_fails_leaves_nothing(tmp_path, failure):
    with pytest.raises(failure), atomic_folder(tmp_path / "new" / "deep" / "folder") as partial:
        (partial / "file").write_text("x")
        raise failure
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_by_a_crash_is_no_obstacle(tmp_path):
    path = tmp_path / "folder"
    (tmp_path / ".folder.partial").mkdir()
    (tmp_path / ".folder.partial" / "rest").write_text("x")
    with atomic_folder(path) as partial:
        (partial / "file").write_text("x")
    assert [file.name for file in path.iterdir()] == ["file"]


def test_a_folder_is_removed(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    remove_atomically(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
