"""A server in a thread of the test's process, with a small model of bytes."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from openai import OpenAI

from linattn.cli.run_folder import FORMAT
from linattn.cli.vocabulary import Bytes
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.serving.engine import Engine
from linattn.serving.protocol import Interface
from linattn.serving.server import Server
from linattn.states import PrefixCache


class Running:
    """A server that runs, at `address`. `call` runs a coroutine in its loop."""

    def __init__(
        self, model, vocabulary=None, *, batch=4, queue=100, max_tokens=5000, timeout=60.0, chat=None, state=None
    ):
        self.loop, self.ready, self.model = asyncio.new_event_loop(), threading.Event(), model
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        interface = Interface("tiny", model, vocabulary or Bytes(), max_tokens, chat, state)

        async def start():
            engine = Engine(model, size=batch, queue=queue, cache=PrefixCache(model, every=16))
            self.server = Server(engine, interface, timeout=timeout)
            return await self.server.start("127.0.0.1", 0)

        self.address = self.call(start())
        self.engine = self.server.engine
        self.client = OpenAI(base_url=self.address, api_key="none", max_retries=0)

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self):
        self.client.close()
        self.call(self.server.stop(grace=0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def metric(self, name):
        for line in (
            self.client.with_options(base_url=self.address.removesuffix("/v1"))
            .get("/metrics", cast_to=str)
            .splitlines()
        ):
            if line.startswith(name + " "):
                return float(line.split()[1])
        raise AssertionError(f"there is no {name}")


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@contextmanager
def running(model, vocabulary=None, **options):
    server = Running(model, vocabulary, **options)
    try:
        yield server
    finally:
        server.close()


def tiny_model(**options):
    torch.manual_seed(0)
    options = {
        "vocab_size": 257,
        "dim": 16,
        "depth": 1,
        "num_heads": 2,
        "attention": "local+elu",
        "window": 8,
    } | options
    model = LanguageModel(LanguageModelConfig(**options)).eval()
    with torch.no_grad():
        # random weights as they are give nearly the same byte again and again
        model.embedding.weight.normal_()
    return model


def write_run(folder, model):
    """Write the folder of a run that was never trained."""
    part = {"documents": 1, "bytes": 1, "tokens": 1, "lost_bytes": 0, "sha256": ""}
    description = {
        "format": FORMAT,
        "created": "",
        "finished": None,
        "paths": [],
        "options": {},
        "tokenizer": None,
        "vocabulary": 257,
        "data": {"training": part, "validation": part},
        "processes": 1,
        "versions": {},
    }
    model.save(folder)
    (folder / "run.json").write_text(json.dumps(description))
    return folder


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def server(model):
    with running(model) as server:
        yield server
