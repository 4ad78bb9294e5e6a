"""`linattn serve`: generate text with the model of a folder for the clients of OpenAI's interface, many at a time."""

import argparse
import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn.cli.argument_types import COUNT, FLAG, NATURAL, POSITIVE, integers
from linattn.cli.loading import load_past, open_model
from linattn.cli.run_folder import is_pretrained
from linattn.console.errors import explained
from linattn.states import PrefixCache

if TYPE_CHECKING:
    from linattn.serving.server import Server

SMALLER = "a smaller --batch or --cache-bytes"
EXTRA = "serve"
SUMMARY = "serve a model to OpenAI's clients"
# a chat template is a program: one with an error is found with these, and not by the first client
MESSAGES = [{"role": "user", "content": "Hello"}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="the folder of a run, or one that transformers loads")
    add("--state", type=Path, metavar="FILE", help="begin each text after what linattn read has read")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="listen there (default: 127.0.0.1, this machine alone)")
    add("--port", default=8000, **integers(0, 65535), help="0: any that is free (default: 8000)")
    add("--batch", default=16, **COUNT, help="generate N texts at a time (default: 16)")
    add("--queue", default=256, **NATURAL, help="let N more requests wait, and refuse others (default: 256)")
    add("--max-tokens", default=4096, **COUNT, help="generate at most N tokens per request (default: 4096)")
    add("--timeout", default=300.0, **POSITIVE, help="end a request after X seconds (default: 300)")
    add("--cache-bytes", default=2**28, **NATURAL, help="keep states of prompts in N bytes (default: 268435456)")
    add("--cpu", **FLAG, help="do not use a GPU")


def run(arguments: argparse.Namespace) -> int:
    # imported here, because `linattn --help` works without the extra
    from linattn.serving.engine import Engine
    from linattn.serving.protocol import Interface
    from linattn.serving.server import Server

    model, vocabulary = open_model(arguments.folder, arguments)
    chat = _checked_chat(vocabulary) if is_pretrained(arguments.folder) else chat_template(arguments.folder)
    state = load_past(model, arguments)
    cache = PrefixCache(model, budget=arguments.cache_bytes) if arguments.cache_bytes else None
    interface = Interface(arguments.folder.resolve().name, model, vocabulary, arguments.max_tokens, chat, state)
    engine = Engine(model, size=arguments.batch, queue=arguments.queue, cache=cache)
    asyncio.run(_serve(Server(engine, interface, timeout=arguments.timeout), arguments))
    return 0


async def _serve(server: "Server", arguments: argparse.Namespace) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    with explained(f"the server cannot listen on {arguments.host}, port {arguments.port}", OSError):
        address = await server.start(arguments.host, arguments.port)
    for number in (signal.SIGINT, signal.SIGTERM):
        # on Windows there are no such handlers, and Ctrl-C cancels this function
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, end.set)
    print(f"{server.interface.name}: {address}", flush=True)
    try:
        await end.wait()
    finally:
        await server.stop()


def _checked_chat(vocabulary: Any) -> Callable[[list[Any]], list[int]] | None:
    """Return the function that writes messages as the vocabulary's chat template, None without one."""
    if not vocabulary.has_chat_template:
        return None
    vocabulary.chat(MESSAGES)
    return vocabulary.chat


def chat_template(folder: Path) -> Callable[[list[Any]], str] | None:
    """Return the function that writes messages as the chat template of the folder's tokenizer, None without one."""
    settings, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    # a damaged file may raise any exception
    with explained(f"the tokenizer of {folder} cannot be loaded", Exception):
        has_template = settings.is_file() and json.loads(settings.read_bytes()).get("chat_template")
        if not has_template and not template.is_file():
            return None
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder)

        def chat(messages: list[Any]) -> str:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

        chat(MESSAGES)
    return chat
