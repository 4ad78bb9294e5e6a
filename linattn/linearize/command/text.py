"""The text of a conversion: windows of tokens, by the model's own tokenizer, or bytes."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from linattn.console.errors import CommandError, explained
from linattn.data.cache import cached_data
from linattn.data.corpus import Choice
from linattn.data.encoder import token_dtype
from linattn.data.row import TokenRow
from linattn.data.windows import TrainingWindows
from linattn.linearize.predictions import predicts_next
from linattn.models.loss import NO_LABEL

PROBE_TOKENS = 1 << 20
"""The largest number of held-out tokens from which probes take passages."""
MASKED = 0.15
"""The share of tokens that is hidden from a masked language model, as in BERT's training."""
PROMPT_END = 100
"""The number of characters that a report shows of each prompt."""
TOKENIZERS = ("tokenizer*", "vocab*", "*.model")
"""The files of tokenizers: of today's, and vocab.json, vocab.txt or spiece.model of older folders."""


class Tokens(NamedTuple):
    training: TokenRow
    held_out: TokenRow


class WindowSizes(NamedTuple):
    """Says what windows of `context` tokens hold. A `mask` (None: no mask) is the token that hides 15 % of the tokens,
    which are the labels. If `packed`, positions begin again with each document, so that none sees those before it."""

    context: int
    mask: int | None = None
    packed: bool = False


def load_tokenizer(model: str, config: PreTrainedConfig) -> Any:
    """Return the model's tokenizer, or None if it has none and its vocabulary is large enough for all bytes."""
    folder = Path(model)
    if not folder.is_dir() or any(any(folder.glob(name)) for name in TOKENIZERS):
        # a damaged file may raise any exception
        with explained(f"the tokenizer of {model} cannot be loaded", Exception):
            return AutoTokenizer.from_pretrained(model)
    if (size := config.get_text_config().vocab_size) < 256:
        raise CommandError(f"{model} has no tokenizer, and its {size} tokens are too few for bytes")
    return None


def read_tokens(choice: Choice, tokenizer: Any, config: PreTrainedConfig, *, context: int) -> Tokens:
    """Tokenize the data of a `choice`, or find their tokens in the cache. The last 20th of the text is held out.
    `config` is the model's, which says how many tokens it knows."""
    encoder = ModelEncoder(tokenizer, config.get_text_config().vocab_size)
    return Tokens(*cached_data(choice, encoder, encoder.identity(), context=context))


@final
class ModelEncoder:
    """Makes tokens of text by the tokenizer of a model with `size` tokens: bytes if it is None.

    `begin` and `end` are the tokens that the tokenizer itself puts around a text, such as BOS and EOS."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size, self.dtype = tokenizer, size, token_dtype(size)
        self.begin, self.end = ((), ()) if tokenizer is None else _special_tokens(tokenizer)
        self._check([*self.begin, *self.end])

    def encode(self, text: bytes) -> Sequence[int]:
        return self.encode_each([text])[0]

    def encode_each(self, texts: Sequence[bytes]) -> Sequence[Sequence[int]]:
        if self.tokenizer is None:
            # numpy would read bytes as one string, but reads a memoryview of them as numbers
            return [memoryview(text) for text in texts]
        decoded = [text.decode("utf-8", "replace") for text in texts]
        rows = self.tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"]
        for row in rows:
            self._check(row)
        return rows

    def lost(self, text: bytes, tokens: Sequence[int]) -> int:
        """Return 0: a conversion compares two models with one tokenizer, by token."""
        return 0

    def identity(self) -> str:
        """Return a text that differs between tokenizers."""
        if self.tokenizer is None:
            return "bytes"
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = sorted(self.tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        return f"{type(self.tokenizer).__name__} {self.begin} {self.end} {words}"

    def _check(self, tokens: Sequence[int]) -> None:
        if (largest := max(tokens, default=0)) >= self.size:
            raise CommandError(f"the tokenizer has a token {largest:,}, but the model has only {self.size:,} tokens")


def packs_documents(model: PreTrainedModel) -> bool:
    """Tell whether the model reads several documents in a row by their positions, which begin again with each."""
    return predicts_next(model) and "position_ids" in inspect.signature(model.forward).parameters


def _special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer puts before a text, and those after it."""
    marked = tokenizer("a", return_special_tokens_mask=True)
    tokens, special = marked["input_ids"], marked["special_tokens_mask"]
    first = special.index(0) if 0 in special else len(special)
    last = len(special) - special[::-1].index(0) if 0 in special else len(special)
    return tuple(tokens[:first]), tuple(tokens[last:])


def windows(
    tokens: TokenRow | np.ndarray, starts: Sequence[int], seeds: Sequence[tuple[int, ...]], sizes: WindowSizes
) -> dict[str, Tensor]:
    """Return a batch of windows of tokens from `starts` on; the seeds choose the tokens that a mask hides."""
    rows = np.stack([tokens[start : start + sizes.context] for start in starts])
    batch = {"input_ids": torch.from_numpy(rows.astype(np.int64))}
    if sizes.packed and isinstance(tokens, TokenRow):
        firsts = [tokens.document_starts(start, start + sizes.context) for start in starts]
        # without a document that begins inside, positions are those that a model counts itself
        if any(first.any() for first in firsts):
            batch["position_ids"] = torch.stack([_positions(first, sizes.context) for first in firsts])
    if sizes.mask is None:
        return batch
    hidden = np.stack([np.random.default_rng(seed).random(sizes.context) < MASKED for seed in seeds])
    # each window must have a prediction
    hidden[:, 0] |= ~hidden.any(1)
    shown, masked = batch["input_ids"], torch.from_numpy(hidden)
    return {
        **batch,
        "input_ids": shown.masked_fill(masked, sizes.mask),
        "labels": shown.masked_fill(~masked, NO_LABEL),
    }


def _positions(starts: np.ndarray, context: int) -> Tensor:
    """Return the distance of each token from the beginning of its document, or of the window."""
    places = np.arange(context)
    begins = np.zeros(context, np.int64)
    begins[starts] = starts
    return torch.from_numpy(places - np.maximum.accumulate(begins))


@final
class TrainingBatches(Sequence[dict[str, Tensor]]):
    """`length` batches of windows, as `windows` makes them, in passes over the tokens, each in a random order. Batch i
    depends on the seed and on i alone, so that training resumes by its number of steps."""

    def __init__(
        self, tokens: TokenRow | np.ndarray, *, batch: int, seed: int, length: int = 1_000_000, **sizes: Any
    ) -> None:
        self.tokens, self.batch, self.seed, self.sizes, self.length = tokens, batch, seed, WindowSizes(**sizes), length
        self.windows = TrainingWindows(tokens, self.sizes.context, seed=seed, length=length * batch)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        numbers = range(index * self.batch, (index + 1) * self.batch)
        starts = [self.windows.start(number) for number in numbers]
        return windows(self.tokens, starts, [(self.seed, number) for number in numbers], self.sizes)


def held_out_batches(tokens: TokenRow | np.ndarray, *, batch: int, count: int, **sizes: Any) -> list[dict[str, Tensor]]:
    """Return at most `count` batches of `batch` windows, as `windows` makes them, evenly spread and without overlap."""
    chosen = WindowSizes(**sizes)
    most = len(tokens) // chosen.context
    starts = (np.linspace(0, most - 1, min(count * batch, most)).round().astype(np.int64) * chosen.context).tolist()
    pieces = (starts[first : first + batch] for first in range(0, len(starts), batch))
    return [windows(tokens, piece, [(0, start) for start in piece], chosen) for piece in pieces]


def probe_text(tokens: TokenRow) -> Tensor:
    """Return the first tokens, as many as the probes read at most."""
    return torch.from_numpy(tokens[:PROBE_TOKENS].astype(np.int64))


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
