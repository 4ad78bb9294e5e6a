"""Queries, keys and values that a language model makes of text it has not seen, for judging feature maps on."""

import argparse
import contextlib
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from linattn.cli import train
from linattn.cli.corpus import open_tokens
from linattn.cli.errors import CommandError
from linattn.cli.run_folder import load_model, open_run, read_log
from linattn.models import LanguageModel
from linattn.nn import MultiheadAttention

CONTEXT, SEQUENCES = 256, 2
MOST_BYTES = 4_000_000
# of linattn train
SMALL = "--attention softmax --dim 128 --depth 2 --heads 2 --convolution 0 --context 256 --batch 8 --lr 3e-3"
BRIEF = "--validation-part 0.1 --evaluate-tokens 16384 --evaluate-every 1000000 --save-every 1000000 --cpu"
Layers = list[tuple[Tensor, Tensor, Tensor]]


class Sample(NamedTuple):
    layers: Layers
    source: str
    """A sentence on where they come from."""


def sample_of_run(folder: Path, text: Path | None) -> Sample:
    run = open_run(folder)
    vocabulary, size = run.vocabulary(), run.description["data"]["validation"]["tokens"]
    if text is None:
        tokens = open_tokens(run.data, "validation", vocabulary.dtype, size)
    else:
        tokens = np.asarray(vocabulary.encode(text.read_bytes()[:MOST_BYTES]), vocabulary.dtype)
    source = f"Queries and keys are those of the model in {folder} on {text or 'its validation data'}."
    return Sample(_collect(load_model(run), tokens), source)


def sample_of_training(text: Path | None, seconds: float) -> Sample:
    """Let `linattn train` train a small softmax model for so many seconds, and look at the last tenth of the text."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    with TemporaryDirectory() as folder:
        words = ["--out", f"{folder}/run", "--minutes", str(seconds / 60), *SMALL.split(), *BRIEF.split()]
        with contextlib.redirect_stdout(sys.stderr):
            train.run(parser.parse_args([*map(str, [text] if text else library), *words]))
        *_, last = read_log(open_run(Path(folder, "run")).log)
        layers, _ = sample_of_run(Path(folder, "run"), None)
    return Sample(
        layers,
        f"Queries and keys are those of a softmax model of 2 layers, 2 heads of 64 channels and rotary positions, on "
        f"text that it has not seen; it learned {text or 'the modules of the standard library'} for {last['step']:,} "
        f"steps of 2,048 bytes, down to {last['validation_bits_per_byte']:.2f} bits per byte.",
    )


def _collect(model: LanguageModel, tokens: np.ndarray) -> Layers:
    """Return the inputs of each layer's inner attention, positions included, for evenly spread sequences."""
    if len(tokens) < CONTEXT:
        raise CommandError(f"there must be {CONTEXT} tokens of text to look at, but there are {len(tokens)}")
    layers: Layers = []

    # a hook's return value would replace the inputs, so it returns None
    def keep(module: object, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        layers.append(inputs)

    starts = np.linspace(0, len(tokens) - CONTEXT, SEQUENCES).astype(int)
    windows = np.stack([tokens[start : start + CONTEXT] for start in starts]).astype(np.int64)
    inner = [part.inner for part in model.modules() if isinstance(part, MultiheadAttention)]
    hooks = [each.register_forward_pre_hook(keep) for each in inner]
    with torch.no_grad():
        model.eval()(torch.from_numpy(windows))
    for hook in hooks:
        hook.remove()
    return layers
