"""What a package index shows and installs."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from linattn.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        return message_from_bytes(wheel.read(name))


def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "linattn").rglob("*") if path.is_file()}
    assert names == {name for name in there if "__pycache__" not in name}
    assert "linattn/py.typed" in names


def test_the_source_distribution_can_be_tested(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"Makefile", "requirements.lock", "README.md", "LICENSE", "tests/conftest.py", "docs/compat.md"} <= names


def test_the_index_can_show_the_description(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_every_link_of_the_description_is_absolute_and_leads_somewhere(metadata):
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    home = re.compile(
        r"https://(?:github\.com/linattn/linattn/blob|raw\.githubusercontent\.com/linattn/linattn)/main/([^#]+)"
    )
    assert links
    for link in links:
        assert link.startswith("https://"), link
        if match := home.match(link):
            assert (ROOT / match[1]).exists(), link


def test_the_metadata_say_who_and_where(metadata):
    assert metadata["Version"] == __version__
    assert {line.partition(",")[0] for line in metadata.get_all("Project-URL")} >= {"Documentation", "Source", "Issues"}
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in metadata.get_all("Classifier")


@pytest.mark.parametrize(("tag", "status"), [("", 0), (f"v{__version__}", 0), ("v99.0.0", 1)])
def test_a_release_has_the_tag_of_its_version(tag, status, built):
    command = [sys.executable, str(Path(__file__).with_name("tag.py")), tag, str(built)]
    assert subprocess.run(command, capture_output=True).returncode == status


def test_workflows_only_call_make():
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        for command in re.findall(r"run: (?!\{)(.+)", workflow.read_text("utf-8")):
            target = re.fullmatch(r"make (\w+)(?: \w+=\S*| TORCH=\$\{\{ [\w.]+ \}\}| TAG=\$\{\{ [\w.]+ \}\})*", command)
            assert target, command
            assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), command
