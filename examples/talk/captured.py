"""Queries, keys and values of every layer of a trained model, as its softmax attention gets them."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from examples.arguments import existing
from examples.learning.characters import split
from examples.pictures import picture
from examples.talk import masked
from linattn import LanguageModel, SoftmaxAttention, attention_weights
from linattn.cli.argument_types import COUNT


class Captured(NamedTuple):
    """The inputs of one layer's attention. Queries and keys are already rotated by their positions."""

    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b h n d"]
    v: Float[Tensor, "b h n dv"]
    causal: bool

    @property
    def weights(self) -> Float[Tensor, "b h n n"]:
        """P = softmax(QKᵀ/√d), in float64."""
        return attention_weights(SoftmaxAttention(causal=self.causal), self.q.double(), self.k.double())


def load(path: Path) -> nn.Module:
    """A folder of `linattn train` (it has a config.json), or one of `examples.talk.masked`."""
    return LanguageModel.load(path) if (path / "config.json").exists() else masked.load(path)


def _folder(text: str) -> Path:
    if not any((Path(text) / name).is_file() for name in ("config.json", masked.WEIGHTS)):
        raise argparse.ArgumentTypeError(f"there is no model in {text}")
    return Path(text)


def parser(description: str | None, *, model: str, count: int) -> argparse.ArgumentParser:
    """Return the parser of the programs that look into a trained model."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=_folder, help=model)
    options.add_argument("--data", type=existing, required=True, help="the text")
    options.add_argument("--texts", **COUNT, default=count, help=f"windows of it ({count})")
    options.add_argument("--out", type=picture, required=True, help="the picture")
    return options


def untrained(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """The same model before its training."""
    torch.manual_seed(seed)
    return LanguageModel(model.config) if isinstance(model, LanguageModel) else masked.make_model()


def texts(model: nn.Module, data: Path, count: int) -> Int[Tensor, "b n"]:
    """Windows of the validation text as this model reads them: bytes, or characters some of which are masked."""
    if isinstance(model, LanguageModel):
        text = torch.frombuffer(bytearray(data.read_bytes()), dtype=torch.uint8).long()
        return masked.windows(text[int(0.95 * len(text)) :], count)
    return masked.masked(masked.windows(split(data)[1], count), masked.rng(2))[0]


@torch.no_grad()
def capture(model: nn.Module, tokens: Int[Tensor, "b n"]) -> list[Captured]:
    """Layer by layer."""
    layers: list[Captured] = []
    with _listening(model, layers):
        model.eval()(tokens)
    if not layers:
        raise ValueError("the model has no layer with softmax attention: linattn train --attention softmax makes some")
    return layers


@contextmanager
def _listening(model: nn.Module, layers: list[Captured]) -> Iterator[None]:
    def note(module: SoftmaxAttention, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        layers.append(Captured(*arguments, module.causal))

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, SoftmaxAttention)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
