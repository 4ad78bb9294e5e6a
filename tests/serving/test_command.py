"""`linattn serve` from its start to its end."""

import json
import os
import signal
import socket
import subprocess
import sys

import openai
import pytest

from linattn.cli.main import main
from linattn.cli.serve import chat_template
from linattn.generation import generate
from linattn.integrations.transformers import byte_tokenizer
from tests.serving.conftest import write_run


@pytest.mark.skipif(os.name == "nt", reason="needs SIGTERM")
def test_a_signal_ends_the_command(model, tmp_path):
    """While a text is generated. The command prints the model's name and the address."""
    run = write_run(tmp_path / "run", model)
    command = [sys.executable, "-m", "linattn.cli", "serve", str(run), "--port", "0", "--timeout", "60", "--cpu"]
    with subprocess.Popen([*command, "--max-tokens", "9"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name, address = process.stdout.readline().strip().split(": ")
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            assert name == "run" == next(iter(client.models.list())).id
            stream = client.completions.create(model="run", prompt=[97], max_tokens=9, temperature=0, stream=True)
            process.send_signal(signal.SIGTERM)
            text = "".join(part.choices[0].text for part in stream)
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
    expected = generate(model, [97], max_new_tokens=9)
    assert text == bytes(expected).decode("utf-8", "replace")


def test_errors_at_the_start_are_one_line(model, tmp_path, capsys):
    run = write_run(tmp_path / "run", model)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert main(["serve", str(run), "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"linattn serve: the server cannot listen on 127.0.0.1, port {port}: ")
    assert main(["serve", str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_the_template_of_the_folder_writes_messages(model, tmp_path):
    run, tokenizer = write_run(tmp_path / "run", model), byte_tokenizer()
    tokenizer.save_pretrained(run)
    assert chat_template(run) is None
    tokenizer.chat_template = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
    tokenizer.save_pretrained(run)
    chat = chat_template(run)
    assert chat is not None and chat([{"role": "user", "content": "a"}, {"role": "b", "content": "c"}]) == "<user>a<b>c"


def test_damaged_files_of_the_tokenizer_are_one_line(model, tmp_path, capsys):
    run, tokenizer = write_run(tmp_path / "run", model), byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(run)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        original = (run / name).read_bytes()
        for content in (b"{% for", b"\xff", *(b"", b"{", b"[]", b"3") * name.endswith("json")):
            (run / name).write_bytes(content)
            assert main(["serve", str(run)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"linattn serve: the tokenizer of {run} cannot be loaded: ")
        (run / name).write_bytes(original)
    (run / "chat_template.jinja").unlink()
    settings = json.loads((run / "tokenizer_config.json").read_text())
    (run / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    assert chat_template(run) is None
