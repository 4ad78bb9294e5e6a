import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs" / "transformers.md"


def test_every_example_of_the_docs_runs_and_writes_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert sum(language == "python" for language, _ in blocks) >= 7
    names, written = {}, ""
    for language, block in blocks:
        if language == "python":
            exec(compile(block, str(DOCS), "exec"), names)
            written = capsys.readouterr().out
        else:
            assert written.strip() == block.strip()
