"""What `make demo` does, with a model that learns nothing in the time it has."""

from linattn.cli import demo
from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from tests.cli.conftest import SHORT, TINY


def test_it_trains_reports_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "MODEL", " ".join(TINY))
    monkeypatch.setattr(demo, "TRAINING", " ".join((*SHORT, "--evaluate-tokens", "1000")))
    assert demo.run() == 0
    output = capsys.readouterr().out
    assert "validation: 7." in output and "bits per byte" in output
    assert demo.PROMPT in output
    data = open_run(tmp_path / "runs" / "demo").description["data"]
    # the library of any Python has some megabytes of sources, and no compiled files among them
    assert 3e6 < data["training"]["bytes"] + data["validation"]["bytes"] < 3e7
    assert main(["generate", "runs/demo", "--max-new-tokens", "3"]) == 0
