"""Texts for the prompts of a file, many at a time: `linattn generate --prompts`."""

import argparse
import codecs
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from linattn.cli.generate import SAMPLING
from linattn.cli.read import goes_on
from linattn.cli.typed_json import read_json
from linattn.console.atomic import remove_partial_files, write_atomically
from linattn.console.errors import CommandError, explained
from linattn.console.lock import locked
from linattn.generation import ContinuousBatch, Request, Sampling
from linattn.generation.texts import TextStream
from linattn.models.token_model import TokenModel
from linattn.states import fingerprint

BAR = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {postfix} [{elapsed}<{remaining}]"
OPTIONS = (*SAMPLING, "max_new_tokens", "seed", "stop")
"""The options that a line may set, each in place of the command's own."""


@with_config(extra="forbid")
class Line(TypedDict):
    """A line of the file of prompts."""

    prompt: str
    id: NotRequired[str | int]
    temperature: NotRequired[float]
    top_k: NotRequired[int | None]
    top_p: NotRequired[float | None]
    min_p: NotRequired[float | None]
    repetition_penalty: NotRequired[float]
    max_new_tokens: NotRequired[int]
    seed: NotRequired[int | None]
    stop: NotRequired[str | None]


class Result(TypedDict):
    """A line of the output: the text that follows the prompt in the `line` with this number, and its tokens' count.
    `request` is the digest of the prompt with all that decides which text follows it."""

    line: int
    id: NotRequired[str | int]
    text: str
    tokens: int
    request: str


START = b'{"line": '
"""The beginning of each line of the output."""


class Job(NamedTuple):
    """A line of the file of prompts that has no answer yet: its number `line`, its `content`, and its request."""

    line: int
    content: Line
    digest: str
    tokens: list[int]
    options: dict[str, Any]


class Reader:
    """Reads the lines of the file as jobs, and makes of each job a request to the continuous batch. All have one model,
    one state and the options of one command; a line may have options of its own."""

    def __init__(self, model: TokenModel, vocabulary: Any, state: Any, arguments: argparse.Namespace) -> None:
        self.path, self.vocabulary, self.state = arguments.prompts, vocabulary, state
        self.defaults = {name: getattr(arguments, name) for name in OPTIONS}
        self.origin = [fingerprint(model)]
        if arguments.state is not None:
            self.origin.append(hashlib.sha256(arguments.state.read_bytes()).hexdigest())

    def jobs(self) -> Iterator[Job]:
        # editors on Windows put a mark of the encoding before the first line
        for number, line in enumerate(self.path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), 1):
            if line.strip():
                with self.explained(number):
                    yield self._job(number, read_json(Line, line))

    def _job(self, number: int, content: Line) -> Job:
        options = {name: content.get(name, default) for name, default in self.defaults.items()}
        facts = json.dumps([content["prompt"], content.get("id"), options, self.origin], sort_keys=True)
        begin = self.vocabulary.begin if self.state is None else ()
        tokens = [*begin, *self.vocabulary.encode(content["prompt"].encode())]
        return Job(number, content, hashlib.sha256(facts.encode()).hexdigest()[:16], tokens, options)

    def request(self, job: Job) -> Request:
        return Request(
            job.tokens,
            max_new_tokens=job.options["max_new_tokens"],
            sampling=Sampling(**{name: job.options[name] for name in SAMPLING}),
            stop_tokens=self.vocabulary.stop_tokens,
            seed=job.options["seed"],
            state=self.state,
        )

    def explained(self, number: int) -> Any:
        return explained(f"line {number} of {self.path}", ValueError)


class Answer:
    """The text that follows a prompt. It ends before the text `stop`."""

    def __init__(self, job: Job, vocabulary: Any) -> None:
        self.job, self.text, self.num_tokens = job, "", 0
        stops = [stop] if (stop := job.options["stop"]) else []
        # the end, as no character of a prompt is half there
        self.pieces = TextStream(vocabulary.decoder(), (*job.tokens, None), stops=stops)

    @property
    def stopped(self) -> bool:
        return self.pieces.stopped

    def extend(self, token: int) -> None:
        self.num_tokens += 1
        self.text += self.pieces.extend(token)

    def result(self) -> str:
        text = self.text + self.pieces.finish()
        line = {"line": self.job.line} | ({"id": self.job.content["id"]} if "id" in self.job.content else {})
        line |= {"text": text, "tokens": self.num_tokens, "request": self.job.digest}
        return json.dumps(line, ensure_ascii=False) + "\n"


def answer_file(model: TokenModel, vocabulary: Any, state: Any, arguments: argparse.Namespace) -> None:
    """Write the answers to the prompts that have none yet, each when its text ends. Then sort the lines by prompt."""
    out, reader = arguments.out, Reader(model, vocabulary, state, arguments)
    batch, jobs = ContinuousBatch(model, size=arguments.batch), list(reader.jobs())
    if not jobs:
        raise CommandError(f"there are no prompts in {arguments.prompts}")
    with locked(out):
        results = {} if arguments.replace else _results(out, jobs, arguments.prompts)
        done, missing = len(results), dict[int, Job]()
        for job in jobs:
            with reader.explained(job.line):
                number = batch.add(reader.request(job))
            if job.line in results:
                batch.cancel(number)
            else:
                missing[number] = job
        remove_partial_files(out)
        mode = "w" if arguments.replace else "a"
        with (
            out.open(mode, encoding="utf-8", newline="\n") as file,
            _Progress(done, len(jobs), goes_on(arguments)) as progress,
        ):
            for answer in _answers(batch, missing, vocabulary, progress):
                results[answer.job.line] = line = answer.result()
                file.write(line)
                file.flush()
        # a list, as texts end in another order
        content = "".join(results[job.line] for job in jobs)
        if content.encode() != out.read_bytes():
            write_atomically(out, content)
    print(f"{out}: {len(jobs):,} texts", flush=True)
    print(f"[{progress.speed()}]", file=sys.stderr)


def _answers(batch: ContinuousBatch, jobs: dict[int, Job], vocabulary: Any, progress: "_Progress") -> Iterator[Answer]:
    """Yield each answer when its text ends. The keys of `jobs` are the numbers of their requests in the batch."""
    answers = dict[int, Answer]()
    while batch:
        with explained("this cannot be generated", ValueError, RuntimeError):
            new = batch.step()
        for number, token, last in new:
            if number not in answers:
                answers[number] = Answer(jobs[number], vocabulary)
            answer = answers[number]
            answer.extend(token)
            if answer.stopped:
                batch.cancel(number)
            if answer.stopped or last:
                yield answers.pop(number)
                progress.texts += 1
        progress.update(len(new))


def _results(out: Path, jobs: Sequence[Job], prompts: Path) -> dict[int, str]:
    """Return the lines that a command wrote before it was interrupted, and drop a last one that is cut."""
    digests, results = {job.line: job.digest for job in jobs}, dict[int, str]()
    content = out.read_bytes() if out.exists() else b""
    *lines, cut = content.split(b"\n")
    other = f"of {out} is no answer to {prompts} by this model with these options"
    again = "choose another --out, or --replace starts over"
    for number, line in enumerate(lines, 1):
        with explained(f"line {number} {other}; {again}", ValueError):
            result: Result = read_json(Result, line)
        if digests.get(result["line"]) != result["request"]:
            raise CommandError(f"line {number} {other}: {again}")
        results[result["line"]] = line.decode() + "\n"
    # another file may end without a line feed, and is not to be cut
    if not START.startswith(cut[: len(START)]):
        raise CommandError(f"line {len(lines) + 1} {other}: {again}")
    if cut:
        with out.open("r+b") as file:
            file.truncate(len(content) - len(cut))
    return results


class _Progress:
    """A bar with the texts that are complete and the tokens per second. An interruption says how to go on."""

    def __init__(self, done: int, total: int, goes_on: str) -> None:
        from tqdm.auto import tqdm

        self.texts, self.total, self.tokens, self.started = done, total, 0, time.monotonic()
        self.goes_on = goes_on
        self.bar = tqdm(
            total=total, initial=done, bar_format=BAR, dynamic_ncols=True, disable=None, leave=False, unit="text"
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.bar.close()
        if kind is KeyboardInterrupt:
            ended = f"interrupted after {self.texts:,} of {self.total:,} texts"
            raise CommandError(f"{ended}: {self.goes_on}", status=130) from None

    def update(self, tokens: int) -> None:
        self.tokens += tokens
        self.bar.set_postfix_str(self.speed(), refresh=False)
        self.bar.update(self.texts - self.bar.n)

    def speed(self) -> str:
        return f"{self.tokens:,} tokens, {self.tokens / max(time.monotonic() - self.started, 1e-9):,.0f} tokens/s"
