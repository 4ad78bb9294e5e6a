"""A language model of bytes on the source of Python's standard library, which every machine has: a Llama of 4 layers.

The text depends on the Python version, so figures of different versions are not comparable to the last digit."""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from examples.linearize.task import Batch, Task, chunks

CONTEXT, BATCH, HELD_OUT = 256, 8, 192


@cache
def text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and those of every 15th file, which are held out."""
    files = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    folders = ("asyncio", "collections", "email", "http", "importlib", "json", "logging", "unittest", "xml")
    for folder in folders:
        files += sorted(Path(sysconfig.get_path("stdlib"), folder).glob("*.py"))
    parts = [files[place::15] for place in range(15)]
    held_out, *training = [b"".join(path.read_bytes() for path in part) for part in parts]
    return _tensor(b"".join(training)), _tensor(held_out)


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


class ByteText:
    """Windows at random places of the training text; the held-out ones are evenly spread."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng([seed, 1])
        self.training, self.validation = text()

    def batch(self) -> Batch:
        return _windows(self.training, self.random.integers(len(self.training) - CONTEXT, size=BATCH))

    def held_out(self) -> list[Batch]:
        return chunks(_windows(self.validation, np.linspace(0, len(self.validation) - CONTEXT, HELD_OUT).astype(int)))


def _windows(tokens: Tensor, starts: np.ndarray) -> Batch:
    places = torch.from_numpy(starts)[:, None] + torch.arange(CONTEXT)
    ids = tokens[places].long()
    return {"input_ids": ids, "labels": ids}


def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=16_384,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


TASK = Task(name="byte_lm", steps=1_200, lr=2e-3, window=32, metric="bits", model=model, data=ByteText)
