"""`linattn generate`: write text with a trained model, token by token, for one prompt or for many at a time."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from linattn.cli.argument_types import COUNT, FLAG, NATURAL, NOT_NEGATIVE, POSITIVE, SEED, SHARE
from linattn.cli.loading import load_past, open_model
from linattn.cli.read import state_after
from linattn.cli.run_folder import is_pretrained
from linattn.console.errors import CommandError, explained
from linattn.console.files import output_file
from linattn.console.processes import ending_together, first_process_only, joined_processes, rank, world_size
from linattn.distributed import shard_sequence
from linattn.generation import Sampling, stream
from linattn.generation.decoding import PREFILL
from linattn.generation.texts import TextStream
from linattn.models.token_model import TokenModel

SMALLER = "a shorter prompt"
SUMMARY = "generate text with the model of a run"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="the folder that linattn train or linearize wrote")
    add("--prompt", metavar="TEXT", help="beginning of the text, or - to read it from stdin")
    add("--state", type=Path, metavar="FILE", help="go on from what linattn read has read")
    add("--chat", **FLAG, help="the prompt is a message: apply the chat template, for folders that have one")
    add("--max-new-tokens", default=500, **NATURAL, help="(default: 500)")
    add("--temperature", default=0.8, **NOT_NEGATIVE, help="0: always the most likely token (default: 0.8)")
    add("--top-k", **COUNT, help="sample from the N most likely tokens")
    add("--top-p", **SHARE, help="sample from the most likely tokens that together reach probability X")
    add("--min-p", **SHARE, help="sample from the tokens with X times the probability of the most likely, or more")
    add("--repetition-penalty", default=1.0, **POSITIVE, help="above 1: repeat less (default: 1)")
    add("--seed", **SEED, help="seed; it gives the same text every time")
    add("--stop", metavar="TEXT", help="end before this text")
    add("--compile", **FLAG, help="compile a step first: a minute, then about three times as fast on a CPU")
    add("--cpu", **FLAG, help="do not use a GPU")
    several = parser.add_argument_group("many prompts")
    add = several.add_argument
    add("--prompts", type=Path, metavar="FILE", help='lines of JSON, each with a "prompt" and, if wanted, options')
    add("--out", type=Path, metavar="FILE", help="the file of the texts, a line of JSON each")
    add("--batch", **COUNT, help="generate N texts at a time (default: 16)")
    add("--replace", **FLAG, help="replace the file of the texts, and do not go on with it")


def run(arguments: argparse.Namespace) -> int:
    _check_file_options(arguments)
    if world_size() > 1:
        return _run_together(arguments)
    text = _prompt(arguments)
    if is_pretrained(arguments.folder) and arguments.state is None and arguments.prompts is None:
        return _run_pretrained(arguments, text.decode("utf-8", "replace"))
    if arguments.chat:
        alone = "is for a --prompt alone, without --state and --prompts" if is_pretrained(arguments.folder) else ""
        raise CommandError(f"--chat {alone or 'needs a chat template, which the tokenizer of a run does not have'}")
    model, vocabulary = open_model(arguments.folder, arguments)
    state = load_past(model, arguments)
    if arguments.prompts is not None:
        # imported here, because `linattn --help` works without the extra
        from linattn.cli.prompts import answer_file

        answer_file(model, vocabulary, state, arguments)
        return 0
    _generate(model, vocabulary, _prompt_tokens(vocabulary, text, state), state, arguments)
    return 0


def _prompt(arguments: argparse.Namespace) -> bytes:
    prompt = arguments.prompt or ""
    return sys.stdin.buffer.read() if prompt == "-" else prompt.encode("utf-8", "surrogateescape")


def _prompt_tokens(vocabulary: Any, text: bytes, state: Any) -> list[int]:
    # tokens at the beginning of a text, where every text that the model has seen starts
    tokens = [*(vocabulary.begin if state is None else ()), *vocabulary.encode(text)]
    if not tokens:
        raise CommandError("a state needs a --prompt, with which the text that was read goes on")
    return tokens


def _run_together(arguments: argparse.Namespace) -> int:
    """Let the processes that torchrun has started read the prompt together, and the first one go on with it."""
    lost = "another process has ended before the prompt was read: give the command again"
    with joined_processes(cpu=arguments.cpu) as group, ending_together(rank(), None, lost):
        for name in ("prompts", "chat", "compile"):
            if getattr(arguments, name):
                raise CommandError(f"--{name} takes one process, but there are {world_size()}")
        if arguments.repetition_penalty != 1:
            raise CommandError("--repetition-penalty counts tokens of the prompt, so it takes one process")
        model, vocabulary = open_model(arguments.folder, arguments)
        past = load_past(model, arguments)
        # the first process alone has stdin, on which the others wait as long as it takes
        text = first_process_only(rank(), arguments.folder, partial(_prompt, arguments))
        tokens = _prompt_tokens(vocabulary, text, past)
        # the last one is read by the first process, which needs its logits
        count, state = len(tokens) - 1, past
        assert group is not None
        with explained("these processes cannot share a prompt", ValueError):
            sharding = shard_sequence(model, group)
        with explained("this cannot be generated", ValueError):
            for part in torch.tensor(tokens[:count], dtype=torch.long).split(PREFILL * world_size()) if count else ():
                state = state_after(model, part, state, group)
        sharding.undo()
    if rank() == 0:
        _generate(model, vocabulary, tokens, past, arguments, read=(count, state))
    return 0


def _check_file_options(arguments: argparse.Namespace) -> None:
    """Raise CommandError for options that have no effect beside the others. Set --batch to its default if it is not
    given, and --out to the file behind a link."""
    if arguments.prompts is None:
        for name in ("out", "batch", "replace"):
            if getattr(arguments, name):
                raise CommandError(f"--{name} is for the texts of --prompts, which is missing")
    elif arguments.compile:
        raise CommandError("--compile is for a single --prompt, but there are --prompts")
    elif arguments.prompt is not None:
        raise CommandError("--prompt is one and --prompts are many: give one of them")
    elif arguments.out is None:
        raise CommandError("--prompts needs --out, the file of the texts")
    elif not arguments.prompts.is_file():
        raise CommandError(f"there is no file {arguments.prompts}")
    else:
        arguments.out = output_file(arguments.out)
        if arguments.out.exists() and arguments.out.samefile(arguments.prompts):
            raise CommandError(f"--out must be another file than --prompts, but both are {arguments.out}")
    arguments.batch = arguments.batch or 16


def _generate(
    model: TokenModel,
    vocabulary: Any,
    tokens: list[int],
    past: Any,
    arguments: argparse.Namespace,
    *,
    read: tuple[int, Any] | None = None,
) -> None:
    """Print the tokens of the prompt, which come after the state `past`, and new ones. `read` holds the number of
    tokens of the prompt that all processes have read together, and the state after them."""
    count, state = read or (0, past)
    times = [time.perf_counter()]
    # torch raises RuntimeErrors when logits overflow or memory is full
    with explained("this cannot be generated", ValueError, RuntimeError):
        steps = stream(
            model,
            [tokens[count:]],
            max_new_tokens=arguments.max_new_tokens,
            sampling=Sampling(**{name: getattr(arguments, name) for name in SAMPLING}),
            stop_tokens=vocabulary.stop_tokens,
            seed=arguments.seed,
            state=state,
            compile=arguments.compile,
        )
        new = _timed((token for (token,) in steps if token is not None), times)
        _write(text(vocabulary, tokens[0 if past is not None else len(vocabulary.begin) :], new, arguments.stop))
    print(_speed(times), file=sys.stderr)


def _run_pretrained(arguments: argparse.Namespace, prompt: str) -> int:
    # this takes seconds to import
    from linattn.cli import pretrained

    if arguments.compile:
        raise CommandError(f"--compile belongs to a run, but {arguments.folder} is none")
    times: list[float] = []
    with explained("this cannot be generated", ValueError, RuntimeError, TypeError):
        sampling = Sampling(**{name: getattr(arguments, name) for name in SAMPLING})
        pieces = pretrained.generated(arguments.folder, prompt, arguments, sampling, times)
        shown, stops = next(pieces), [arguments.stop] if arguments.stop else []
        _write(chain([shown], TextStream(lambda piece: piece or "", stops=stops).read(pieces)))
    print(_speed(times), file=sys.stderr)
    return 0


def _timed(tokens: Iterable[int], times: list[float]) -> Iterator[int]:
    """Yield the tokens, and append the time of each to `times`."""
    for token in tokens:
        times.append(time.perf_counter())
        yield token


def _speed(times: list[float]) -> str:
    """Describe the speed after the first token. `times` has the time of the start and that of each token."""
    count = len(times) - 1
    if count < 2:
        return f"[{count} tokens]"
    started, first, *_, last = times
    speed = (count - 1) / (last - first)
    return f"[{count} tokens, {speed:,.0f} tokens/s after {first - started:.2f} s for the prompt]"


def text(vocabulary: Any, prompt: Iterable[int], new: Iterable[int], stop: str | None) -> Iterator[str]:
    """Yield the prompt, then the text of the new tokens, in pieces that no later token changes. If the text `stop` is
    generated, the output ends right before it."""
    pieces = TextStream(vocabulary.decoder(), prompt, stops=[stop] if stop else [])
    yield pieces.prompt
    yield from pieces.read(new)


def _write(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
