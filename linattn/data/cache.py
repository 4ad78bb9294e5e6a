"""The cache of tokens: data are tokenized once, for any number of commands, beside what `datasets` itself caches."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from linattn.console.atomic import atomic_folder, write_atomically
from linattn.console.errors import explained
from linattn.console.lock import locked
from linattn.data.corpus import Choice, check_lengths, open_data, write_data
from linattn.data.encoder import Encoder
from linattn.data.part import Parts
from linattn.data.row import TokenRow
from linattn.data.sources import HUB

PARTS = "parts.json"


def cached_data(choice: Choice, encoder: Encoder, tokenizer: str, *, context: int) -> tuple[TokenRow, TokenRow]:
    """Return the rows of tokens for training and for validation, from the cache if these data have been tokenized.

    `tokenizer` identifies the encoder. Files count as changed if their size or time of change is another; a data set of
    the Hub is read once. Raises CommandError unless both rows have `context` tokens."""
    facts = [vars(choice), list(_files(choice)), tokenizer, encoder.dtype]
    digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets") / "linattn" / digest
    # another command may be tokenizing the same data
    with locked(folder, wait=True):
        if not folder.exists():
            with atomic_folder(folder) as partial:
                written = write_data(choice, encoder, partial, context=context)
                write_atomically(partial / PARTS, json.dumps(written))
        with explained(f"{folder / PARTS} is corrupt", ValueError):
            parts: Parts = json.loads((folder / PARTS).read_bytes())
    check_lengths(parts, context)
    training = open_data(folder, "training", parts["training"], encoder.dtype)
    return training, open_data(folder, "validation", parts["validation"], encoder.dtype)


def _files(choice: Choice) -> Iterator[tuple[str, int, int]]:
    """Yield each file's path with its size and the time of its last change."""
    for path in (*choice.paths, *choice.validation_paths):
        if path.startswith(HUB):
            continue
        files = [Path(path)] if Path(path).is_file() else sorted(Path(path).rglob("*"))
        for file in files:
            if file.is_file():
                yield str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns
