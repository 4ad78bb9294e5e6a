"""The text of a conversion: windows of tokens, by the model's own tokenizer, or bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig

from linattn.console.errors import CommandError, explained
from linattn.console.files import find_files
from linattn.models.loss import NO_LABEL

VALIDATION = 20
"""One piece of text in so many is held out."""
PIECE = 1 << 16
"""The number of bytes per piece. A tokenizer gets one piece at a time."""
MASKED = 0.15
"""The share of tokens that is hidden from a masked language model, as in BERT's training."""
PROMPT_END = 100
"""The number of characters that a report shows of each prompt."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class Tokens(NamedTuple):
    training: Tensor
    held_out: Tensor


def load_tokenizer(model: str, config: PreTrainedConfig) -> Any:
    """Return the model's tokenizer, or None if it has none and its vocabulary is large enough for all bytes."""
    folder = Path(model)
    if not folder.is_dir() or any((folder / name).exists() for name in TOKENIZERS):
        # a damaged file may raise any exception
        with explained(f"the tokenizer of {model} cannot be loaded", Exception):
            return AutoTokenizer.from_pretrained(model)
    if (size := config.get_text_config().vocab_size) < 256:
        raise CommandError(f"{model} has no tokenizer, and its {size} tokens are too few for bytes")
    return None


def read_tokens(paths: Sequence[str], include: Sequence[str], tokenizer: Any) -> Tokens:
    """Tokenize the files at `paths`, in folders only those whose names match `include` (as in `find_files`). Every 20th
    piece of 64 KiB is held out, or the last 20th of a shorter text."""
    data = b"\n".join(path.read_bytes() for path in find_files(paths, include))
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    if len(pieces) < VALIDATION:
        cut = len(data) - len(data) // VALIDATION
        pieces = [data[:cut], *[b""] * (VALIDATION - 2), data[cut:]]
    held_out = pieces[VALIDATION - 1 :: VALIDATION]
    del pieces[VALIDATION - 1 :: VALIDATION]
    return Tokens(_numbers(pieces, tokenizer), _numbers(held_out, tokenizer))


def _numbers(pieces: Sequence[bytes], tokenizer: Any) -> Tensor:
    if tokenizer is None:
        return torch.from_numpy(np.frombuffer(b"".join(pieces), np.uint8).astype(np.int64))
    texts = [piece.decode("utf-8", "replace") for piece in pieces if piece]
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)


def windows(
    tokens: Tensor, starts: np.ndarray, context: int, mask: int | None, random: np.random.Generator
) -> dict[str, Tensor]:
    """Return a batch of windows of `context` tokens from `starts` on. With a `mask`, this token hides 15 % of the
    tokens, which `random` chooses and which are the labels."""
    rows = tokens[torch.from_numpy(starts)[:, None] + torch.arange(context)]
    if mask is None:
        return {"input_ids": rows}
    hidden = torch.from_numpy(random.random(tuple(rows.shape)) < MASKED)
    # each batch must have a prediction
    hidden[0, 0] |= not hidden.any()
    return {"input_ids": rows.masked_fill(hidden, mask), "labels": rows.masked_fill(~hidden, NO_LABEL)}


@final
class TrainingBatches(Sequence[dict[str, Tensor]]):
    """`length` batches of `batch` windows of `context` tokens at random places, as `windows` makes them with `mask`.
    Batch i depends on the seed and on i alone, so that training can resume."""

    def __init__(
        self, tokens: Tensor, *, context: int, batch: int, seed: int, mask: int | None = None, length: int = 1_000_000
    ) -> None:
        self.tokens, self.context, self.batch, self.seed, self.mask = tokens, context, batch, seed, mask
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        random = np.random.default_rng((self.seed, index))
        starts = random.integers(len(self.tokens) - self.context + 1, size=self.batch)
        return windows(self.tokens, starts, self.context, self.mask, random)


def held_out_batches(
    tokens: Tensor, *, context: int, batch: int, count: int, mask: int | None = None
) -> list[dict[str, Tensor]]:
    """Return at most `count` batches of `batch` windows of `context` tokens, evenly spread and without overlap, as
    `windows` makes them with `mask`."""
    most, random = len(tokens) // context, np.random.default_rng(0)
    starts = np.linspace(0, most - 1, min(count * batch, most)).round().astype(np.int64) * context
    pieces = (starts[start : start + batch] for start in range(0, len(starts), batch))
    return [windows(tokens, piece, context, mask, random) for piece in pieces]


def decoded_samples(generated: dict[str, Any] | None, tokenizer: Any) -> list[dict[str, str]]:
    """Return the samples in `generated`, a field of a report's dict, as texts; of the prompts, only the ends."""
    samples = []
    for sample in (generated or {}).get("samples", ()):
        texts = {name: _text(numbers, tokenizer) for name, numbers in sample.items()}
        samples.append({**texts, "prompt": texts["prompt"][-PROMPT_END:]})
    return samples


def _text(numbers: Sequence[int], tokenizer: Any) -> str:
    if tokenizer is not None:
        return tokenizer.decode(numbers)
    return bytes(number for number in numbers if number < 256).decode("utf-8", "replace")
