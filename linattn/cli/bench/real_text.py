"""Queries, keys and values that a language model makes of text it has not seen, for judging feature maps on."""

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from linattn.attention.base import InnerAttention
from linattn.cli.corpus import find_files, open_tokens
from linattn.cli.errors import CommandError
from linattn.cli.run_folder import load_model, open_run
from linattn.cli.vocabulary import Bytes, Vocabulary
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.models.loss import next_token_loss
from linattn.nn import MultiheadAttention

CONTEXT, SEQUENCES, BATCH = 256, 2, 8
MOST_BYTES = 4_000_000
SMALL = LanguageModelConfig(vocab_size=Bytes.size, dim=128, depth=2, num_heads=2, attention="softmax")
Layers = list[tuple[Tensor, Tensor, Tensor]]


class Sample(NamedTuple):
    layers: Layers
    source: str
    """A sentence on where they come from."""


def sample_of_run(folder: Path, text: Path | None) -> Sample:
    run = open_run(folder)
    vocabulary = run.vocabulary()
    if text is None:
        tokens = open_tokens(run.data, "validation", vocabulary.dtype, run.description["data"]["validation"]["tokens"])
        of = "its validation data"
    else:
        tokens, of = _read(text, vocabulary), str(text)
    return Sample(collect(load_model(run), tokens), f"Queries and keys are those of the model in {folder} on {of}.")


def sample_of_training(text: Path | None, seconds: float) -> Sample:
    """A small softmax model learns for so many seconds; its last tenth of the text is kept from it."""
    tokens = _read(text, Bytes()) if text else _standard_library()
    cut = len(tokens) - max(CONTEXT + 1, len(tokens) // 10)
    if cut <= CONTEXT:
        raise CommandError(f"there must be more than {2 * CONTEXT + 1} bytes of text, but there are {len(tokens)}")
    torch.manual_seed(0)
    model = LanguageModel(SMALL)
    steps, loss = _train(model, tokens[:cut], seconds)
    name = str(text) if text else "the sources of Python's standard library"
    return Sample(
        collect(model, tokens[cut:]),
        f"Queries and keys are those of a softmax model of {SMALL.depth} layers, {SMALL.num_heads} heads of "
        f"{SMALL.channels} channels and rotary positions, on text that it has not seen; it learned {name} for "
        f"{steps} steps of {BATCH * CONTEXT:,} bytes, down to a loss of {loss:.2f} nats a byte.",
    )


def collect(model: LanguageModel, tokens: np.ndarray) -> Layers:
    """What each layer's inner attention is given, positions included: evenly spread sequences."""
    if len(tokens) < CONTEXT:
        raise CommandError(f"there must be {CONTEXT} tokens of text to look at, but there are {len(tokens)}")
    layers: Layers = []
    inner: list[InnerAttention] = [part.inner for part in model.modules() if isinstance(part, MultiheadAttention)]
    # a hook may return a value, so one that returns nothing
    hooks = [each.register_forward_pre_hook(_keeps(layers)) for each in inner]
    try:
        with torch.no_grad():
            model.eval()(_windows(tokens, np.linspace(0, len(tokens) - CONTEXT, SEQUENCES).astype(int)))
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def _keeps(layers: Layers) -> Callable[[object, tuple[Tensor, Tensor, Tensor]], None]:
    def keep(module: object, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        layers.append(inputs)

    return keep


def _train(model: LanguageModel, tokens: np.ndarray, seconds: float) -> tuple[int, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw, end, steps, losses = np.random.default_rng(0), time.monotonic() + seconds, 0, []
    while time.monotonic() < end:
        batch = _windows(tokens, draw.integers(len(tokens) - CONTEXT, size=BATCH))
        optimizer.zero_grad()
        loss = next_token_loss(model(batch[:, :-1]), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        steps += 1
    return steps, float(np.mean(losses[-10:])) if losses else float("nan")


def _windows(tokens: np.ndarray, starts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack([tokens[start : start + CONTEXT] for start in starts]).astype(np.int64))


def _read(text: Path, vocabulary: Vocabulary) -> np.ndarray:
    with open(text, "rb") as stream:
        return np.asarray(vocabulary.encode(stream.read(MOST_BYTES)), vocabulary.dtype)


def _standard_library() -> np.ndarray:
    """As much of it as is quickly read."""
    found, size = [], 0
    for file in find_files([sysconfig.get_paths()["stdlib"]], ("*.py",), ("test", "tests", "site-packages")):
        found.append(file.read_bytes())
        size += len(found[-1])
        if size > MOST_BYTES:
            break
    return np.frombuffer(b"\n".join(found), np.uint8)
