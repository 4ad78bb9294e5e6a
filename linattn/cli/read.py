"""`linattn read`: read texts of any length with the model of a run, once. The state after them becomes a file, from
which `linattn generate --state` goes on as often as wanted."""

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from linattn.cli.argument_types import FLAG
from linattn.cli.loading import load_past, open_model
from linattn.cli.vocabulary import Bytes
from linattn.console.atomic import remove_partial_files
from linattn.console.errors import CommandError, explained
from linattn.console.files import find_files, output_file
from linattn.console.lock import locked
from linattn.console.processes import ending_together, first_process_only, has_lost_process, joined_processes
from linattn.distributed import last_state, shard_sequence
from linattn.models.token_model import TokenModel
from linattn.nn.modes import evaluating
from linattn.states import describe_state, load_state, save_state

SMALLER = "a smaller model"
SUMMARY = "read texts, once, and keep what was read in a file"
# tokens per call and process, bytes per read of a file, and seconds between two saves of what was read so far
PIECE, BLOCK, SAVED = 8192, 2**20, 20.0
BAR = "{percentage:3.0f}% |{bar}| {postfix} [{elapsed}<{remaining}]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="the folder that linattn train or linearize wrote")
    add("texts", nargs="+", metavar="FILE", help="files or folders, read in this order, or - for stdin")
    add("--out", type=Path, required=True, metavar="FILE", help="the file of the state")
    add("--state", type=Path, metavar="FILE", help="go on from this state, which stays as it is")
    add("--replace", **FLAG, help="replace the file, and what an interrupted reading left")
    add("--cpu", **FLAG, help="do not use a GPU")


def run(arguments: argparse.Namespace) -> int:
    arguments.out = output_file(arguments.out)
    if arguments.out.exists() and not (arguments.replace or unfinished(arguments.out).exists()):
        raise CommandError(f"there is a file {arguments.out} already: --replace replaces it")
    files = [] if arguments.texts == ["-"] else find_files(arguments.texts)
    if arguments.out.exists() and any(map(arguments.out.samefile, files)):
        raise CommandError(f"--out must be no file that is read, but {arguments.out} is among the texts")
    with joined_processes(cpu=arguments.cpu) as group, ExitStack() as stack:
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        with ending_together(rank, arguments.out, f"another process has ended: {goes_on(arguments)}"):
            if not files and group is not None:
                raise CommandError("only the first process has stdin: name files instead of -")
            model, vocabulary = open_model(arguments.folder, arguments)
            first_process_only(rank, arguments.out, partial(_begin, arguments, stack))
            if group is not None:
                with explained("these processes cannot share a text", ValueError):
                    shard_sequence(model, group)
            reading = Reading(model, arguments, group)
            reading.read(pieces(vocabulary, files, PIECE * ranks), sum(file.stat().st_size for file in files))
    return 0


def _begin(arguments: argparse.Namespace, stack: ExitStack) -> None:
    stack.enter_context(locked(arguments.out))
    for path in (arguments.out, unfinished(arguments.out)):
        remove_partial_files(path)
    if arguments.replace:
        unfinished(arguments.out).unlink(missing_ok=True)


def goes_on(arguments: argparse.Namespace) -> str:
    """Return the message that says how an interrupted command goes on. With --replace it would start over."""
    return f"the same command{', without --replace,' if arguments.replace else ''} goes on"


def unfinished(out: Path) -> Path:
    """Return the file of the state until everything is read."""
    return out.with_name(f".{out.name}.unfinished")


class Place(NamedTuple):
    """The state after `num_tokens` tokens of the texts, and `digest`, their SHA-256 so far."""

    state: Any
    num_tokens: int
    digest: Any


class Reading:
    """Reads the texts and saves the state now and then, so that the same command goes on after an interruption. `place`
    is the state so far with its number of tokens; one assignment replaces it, so an interruption never finds half of
    it. `before` is the number of tokens in the state of --state, `done` the number of tokens read before an
    interruption.

    The processes of a `group` read each piece together. All of them have the state after it, and the first one writes
    and reports."""

    def __init__(self, model: TokenModel, arguments: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
        self.model, self.out, self.group, self.goes_on = model, arguments.out, group, goes_on(arguments)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.unfinished = unfinished(arguments.out)
        self.before, self.done, self.begun = 0, 0, ""
        self.expected: str | None = None
        self.place = Place(load_past(model, arguments), 0, hashlib.sha256())
        if arguments.state is not None:
            self.before = describe_state(arguments.state).num_tokens or 0
            self.begun = hashlib.sha256(arguments.state.read_bytes()).hexdigest()
        if self.unfinished.exists():
            self._resume()

    def _resume(self) -> None:
        again = f"{self.unfinished} is left of another reading: --replace starts over"
        with explained(again, ValueError):
            state = load_state(self.unfinished, model=self.model)
            described = describe_state(self.unfinished)
        notes = described.notes or {}
        if notes.get("begun") != self.begun:
            raise CommandError(f"{again}; that one began with another state")
        self.expected, self.done = notes["sha256"], (described.num_tokens or 0) - self.before
        self.place = self.place._replace(state=state)

    def read(self, tokens: Iterator[tuple[Sequence[int], int]], size: int) -> None:
        """Read the `tokens`, which come in pieces with the number of bytes of each, and write the file. `size` is the
        number of all bytes, 0 if unknown."""
        from tqdm.auto import tqdm

        started, saved, empty = time.monotonic(), time.monotonic(), True
        form = BAR if size else None
        bar = tqdm(total=size or None, bar_format=form, dynamic_ncols=True, disable=self.rank > 0 or None, leave=False)
        try:
            for piece, bytes_read in tokens:
                empty = empty and not bytes_read
                part = torch.as_tensor(piece, dtype=torch.long)
                known = min(len(part), max(0, self.done - self.place.num_tokens))
                self._skip(part[:known])
                if known < len(part):
                    self._extend(part[known:])
                bar.set_postfix_str(self._speed(started), refresh=False)
                bar.update(bytes_read)
                # while tokens are skipped, the state is that after later ones
                if self.place.num_tokens > self.done and time.monotonic() - saved > SAVED:
                    self._save(self.unfinished)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            if self.place.num_tokens <= self.done:
                raise
            self._save(self.unfinished)
            message = f"interrupted after {self.place.num_tokens:,} tokens: {self.goes_on}"
            raise CommandError(message, status=130) from None
        except RuntimeError as error:
            if has_lost_process(error) and self.place.num_tokens > self.done:
                self._save(self.unfinished)
            raise
        finally:
            bar.close()
        if self.place.num_tokens < self.done:
            raise CommandError(f"{self.unfinished} is left of a longer reading: --replace starts over")
        if empty:
            raise CommandError("the texts are empty: there is nothing to read")
        self._save(self.out)
        if self.rank > 0:
            return
        self.unfinished.unlink(missing_ok=True)
        count, size = self.before + self.place.num_tokens, self.out.stat().st_size
        print(f"{self.out}: {count:,} tokens, {size:,} bytes", flush=True)
        print(f"[{self._speed(started)}]", file=sys.stderr)

    def _skip(self, part: torch.Tensor) -> None:
        """Pass over tokens that were read before the command was interrupted. They must be the same."""
        self.place.digest.update(part.numpy().tobytes())
        self.place = self.place._replace(num_tokens=self.place.num_tokens + len(part))
        if len(part) and self.place.num_tokens == self.done and self.place.digest.hexdigest() != self.expected:
            raise CommandError(f"{self.unfinished} is left of a reading of other texts: --replace starts over")

    def _extend(self, part: torch.Tensor) -> None:
        with explained("this cannot be read", ValueError):
            state = state_after(self.model, part, self.place.state, self.group)
        digest = self.place.digest.copy()
        digest.update(part.numpy().tobytes())
        self.place = Place(state, self.place.num_tokens + len(part), digest)

    def _save(self, path: Path) -> None:
        if self.rank > 0:
            return
        state, count, digest = self.place
        notes = {"sha256": digest.hexdigest(), "begun": self.begun}
        save_state(state, path, model=self.model, num_tokens=self.before + count, notes=notes)

    def _speed(self, started: float) -> str:
        count = self.place.num_tokens
        speed = max(0, count - self.done) / max(time.monotonic() - started, 1e-9)
        return f"{count:,} tokens, {speed:,.0f} tokens/s"


@torch.inference_mode()
def state_after(model: TokenModel, tokens: torch.Tensor, state: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the state after the tokens (n), which come after `state`. The processes of a `group` read a part each of
    them, with a model that `shard_sequence` has changed, and all get the state after all tokens. All raise ValueError
    if the model has no positions for them."""
    past = 0 if state is None or state.position is None else int(state.position)
    if model.max_length is not None and (length := past + len(tokens)) > model.max_length:
        raise ValueError(f"the model's positions end at {model.max_length}, but there are {length} tokens")
    own = tokens
    if group is not None:
        own = tokens.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
    with evaluating(model):
        _, state = model.extend_hidden(own.unsqueeze(0).to(model.device), state)
    return state if group is None else last_state(state, group=group)


def pieces(vocabulary: Any, files: Sequence[Path], length: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the tokens of the files (of stdin, if there are no files) in pieces of at most `length` tokens, each with
    the number of bytes of its text. Every text begins with the tokens `begin` of the vocabulary."""
    for path in files or (None,):
        yield list(vocabulary.begin), 0
        with sys.stdin.buffer if path is None else path.open("rb") as file:
            # words of a tokenizer may go across the border of two blocks
            size = BLOCK if isinstance(vocabulary, Bytes) else -1
            while block := file.read(size):
                tokens, left = vocabulary.encode(block), len(block)
                for start in range(0, len(tokens), length):
                    part = tokens[start : start + length]
                    share = left if start + length >= len(tokens) else len(block) * len(part) // len(tokens)
                    left -= share
                    yield list(part), share
