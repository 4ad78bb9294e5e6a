"""The gain of the state as a value, on one thread: texts that are not read again, the memory of training on a long
sequence, and the time of generating many texts in one batch.

    python benchmarks/states.py [--tokens 100000] [--repeats 5]
        [--parts reading,back,training,batches,conversations,serve]
    python benchmarks/states.py --parts reading,batches --tokens 16384 --models "4 × 128, softmax"

Models with softmax attention, which keep all keys and values, run if they are named. The models have random weights,
which take the same time as trained ones. Times are medians of turns."""

import argparse
import asyncio
import multiprocessing
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import torch

from linattn import ContinuousBatch, LanguageModel, LanguageModelConfig, Request, generate, generate_each, states
from linattn.cli.argument_types import names_from
from linattn.cli.vocabulary import Bytes
from linattn.models.loss import next_token_loss
from linattn.nn.modes import evaluating
from linattn.ops.nested import map_state
from linattn.serving.engine import Engine
from linattn.serving.protocol import Interface
from linattn.serving.server import Server

MODELS = {
    "4 × 128, local:2+elu:2": {"dim": 128, "depth": 4, "num_heads": 4, "attention": "local:2+elu:2", "window": 64},
    "8 × 256, gated_delta": {"dim": 256, "depth": 8, "num_heads": 4, "attention": "gated_delta", "rotary": None},
    "8 × 256, local:2+elu:2": {"dim": 256, "depth": 8, "num_heads": 4, "attention": "local:2+elu:2", "window": 64},
    "4 × 128, softmax": {"dim": 128, "depth": 4, "num_heads": 4, "attention": "softmax"},
    "8 × 256, softmax": {"dim": 256, "depth": 8, "num_heads": 4, "attention": "softmax"},
}
LINEAR = tuple(name for name in MODELS if not name.endswith("softmax"))
SEGMENT = 2048
PARTS = ("reading", "back", "training", "batches", "conversations", "serve")
ROWS, CONVERSATIONS, CLIENTS = 16, 1000, (1, 64, 128, 192, 256)
TEXT, EVERY, BACK = 15_000, 256, (1, 100, 4000)
"""A text's tokens, the tokens from one of its states to the next, and the tokens that are taken back."""
SHORTEST, LONGEST = 20, 400
"""The new tokens of a text: any number between these is as likely, or short texts are more likely than long ones."""


def model(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(vocab_size=257, **MODELS[name]))


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call()
    return clock() - started


def reading(name: str, tokens: int, repeats: int, folder: Path) -> None:
    """Compare the first token of a question after a text: from the file of its state, and by reading the text again."""
    reader, text, question = model(name).eval(), torch.randint(256, (tokens,)), torch.randint(256, (1, 1))

    def read() -> object:
        state = None
        for piece in text.split(8192):
            _, state = reader.extend_hidden(piece[None], state)
        return state

    def first_token(state: object) -> object:
        return reader.logits(reader.extend_hidden(question, state)[0]).argmax()

    file, again, stored = folder / "text.state", [], []
    with torch.inference_mode(), evaluating(reader):
        states.save_state(read(), file, model=reader, num_tokens=tokens)
        for _ in range(repeats):
            again.append(seconds(lambda: first_token(read())))
            stored.append(seconds(lambda: first_token(states.load_state(file, model=reader))))
    long, short = statistics.median(again), statistics.median(stored)
    size, times = file.stat().st_size / 1000, f"{long:6.2f} s again, {1000 * short:5.1f} ms"
    print(f"{name:24} {tokens:>9,} tokens: {times} from {size:,.0f} kB, {long / short:,.0f} ×")


def back(name: str, repeats: int) -> None:
    """Compare the state some tokens ago, from the nearest state in a cache of prefixes, with reading the text again."""
    reader, text = model(name).eval(), torch.randint(256, (TEXT,))
    cache = states.PrefixCache(reader, every=EVERY)
    cache.read(text)
    count, size = len(cache), cache.num_bytes / 2**20
    print(f"{name:24} {TEXT:,} tokens, {count} states, {size:.0f} MiB; taken back:", end="")
    for tokens in BACK:
        # a token more each time, as the cache then has the state itself
        near = [seconds(partial(cache.read, text[: -tokens - i])) for i in range(repeats)]
        again = [seconds(partial(states.PrefixCache(reader, every=TEXT).read, text[:-tokens])) for _ in range(repeats)]
        ours, theirs = statistics.median(near), statistics.median(again)
        print(f" {tokens:,}: {1000 * ours:.1f} ms, again {1000 * theirs:,.0f} ms;", end="", flush=True)
    print()


def train(name: str, tokens: int, segment: int) -> None:
    """Print the seconds per token, and the MiB above the start, of one forward and backward pass."""
    learner, text = model(name), torch.randint(256, (1, tokens))
    next_token_loss(learner(text[:, :2]), text[:, :2]).backward()
    # Linux gives a new process the peak of the one that started it
    (forget := Path("/proc/self/clear_refs")).exists() and forget.write_text("5")
    start, started = peak(), time.process_time()
    if segment:
        states.segmented_loss(learner, text, segment=segment)[0].backward()
    else:
        next_token_loss(learner(text), text).backward()
    print(f"{1e6 * (time.process_time() - started) / tokens:.1f} µs per token, {(peak() - start) / 2**20:,.0f} MiB")


def some_requests(count: int, *, uniform: bool) -> list[Request]:
    """Return requests with prompts of 35 to 953 tokens. The numbers of new tokens have a mean of 210 or, if not
    uniform, fall off exponentially, as those of answers in conversations do."""
    choose, requests = random.Random(0), list[Request]()
    for _ in range(count):
        prompt = [choose.randrange(256) for _ in range(choose.randint(35, 953))]
        length = choose.randint(SHORTEST, LONGEST)
        if not uniform:
            length = min(SHORTEST + int(choose.expovariate(1 / 100)), LONGEST)
        requests.append(Request(prompt, max_new_tokens=length))
    return requests


Ends = list[float]
"""The seconds from the beginning to the end of each text; all texts are wanted at the beginning."""


def alone(writer: LanguageModel, requests: list[Request]) -> Ends:
    return padded(writer, requests, rows=1)


def padded(writer: LanguageModel, requests: list[Request], rows: int = ROWS) -> Ends:
    started, ends = time.process_time(), list[float]()
    for start in range(0, len(requests), rows):
        part = requests[start : start + rows]
        generate(writer, [row.prompt for row in part], max_new_tokens=max(row.max_new_tokens for row in part))
        ends += [time.process_time() - started] * len(part)
    return ends


def continuous(writer: LanguageModel, requests: list[Request]) -> Ends:
    started = time.process_time()
    return [time.process_time() - started for _ in generate_each(writer, requests, size=ROWS)]


def batches(name: str, repeats: int) -> None:
    """Compare a continuous batch with one text after another, and with batches that are padded to their longest prompt
    and end with their longest text: the tokens per second, the mean time to the end of a text, and the number of calls
    that generate, whose ratio bounds the gain. Seconds are the process's own."""
    writer, calls = model(name).eval(), [0]
    writer.embedding.register_forward_pre_hook(lambda _, inputs: calls.append(calls.pop() + (inputs[0].shape[1] == 1)))
    for count, uniform in ((ROWS, True), (4 * ROWS, True), (4 * ROWS, False)):
        requests = some_requests(count, uniform=uniform)
        ways = (alone, padded, continuous) if count == ROWS else (padded, continuous)
        turns, steps = [dict[Any, Ends]() for _ in range(repeats)], dict[Any, int]()
        for turn in turns:
            for way in ways:
                calls[0] = 0
                turn[way], steps[way] = way(writer, requests), calls[0]
        total = sum(each.max_new_tokens for each in requests)
        print(f"{name:24} {count} texts of {'any' if uniform else 'mostly few'} new tokens")
        for way in ways:
            last, mean = (statistics.median(size(turn[way]) for turn in turns) for size in (max, statistics.fmean))
            faster, sooner = (
                statistics.median(size(turn[way]) / size(turn[continuous]) for turn in turns)
                for size in (max, statistics.fmean)
            )
            gain = f": continuous {faster:.2f} × as fast, an answer {sooner:.2f} × as soon, {{:.2f}} × fewer calls"
            compared = "" if way is continuous else gain.format(steps[way] / steps[continuous])
            speed = f"{total / last:6.0f} tokens/s, {mean:5.2f} s to an answer, {steps[way]} calls"
            print(f"{name:24}   {way.__name__:10} {speed}{compared}", flush=True)


def conversations(name: str) -> None:
    """Compare the bytes of the states of many open texts with those of one."""
    writer, text = model(name).eval(), torch.randint(256, (1, 65))
    batch, held = ContinuousBatch(writer, size=CONVERSATIONS), dict[int, int]()
    for _ in range(CONVERSATIONS):
        batch.add(Request(text[0].tolist(), max_new_tokens=1000))
    while len(batch.step()) < CONVERSATIONS:
        pass
    for group in batch._groups:
        map_state(lambda x: held.update({x.data_ptr(): x.untyped_storage().nbytes()}), group.state.state)
    with torch.inference_mode():
        one = states.num_bytes(writer.extend_hidden(text)[1])
    size, ratio = sum(held.values()), sum(held.values()) / (CONVERSATIONS * one)
    print(f"{name:24} {CONVERSATIONS:,} open texts: {size / 2**20:,.0f} MiB, {ratio:.3f} × as many times one state")


def server(name: str, pipe: Connection) -> None:
    """Serve a model without a cache, in a process of its own. Send the address, then wait to be killed."""
    torch.set_num_threads(1)

    async def run() -> None:
        served = model(name).eval()
        engine = Engine(served, size=max(CLIENTS), queue=0, cache=None)
        interface = Interface("model", served, Bytes(), 10_000)
        pipe.send(await Server(engine, interface, timeout=1000).start("127.0.0.1", 0))
        await asyncio.Event().wait()

    asyncio.run(run())


async def read_streams(address: str, count: int, process: int, prompt: int = 100) -> tuple[float, float]:
    """Return the tokens per second of so many clients at once, each with a stream, and the median of the bytes that the
    server has in memory while it generates."""
    tokens, sizes = 100, list[float]()
    body = {"model": "model", "prompt": prompt * [1], "max_tokens": tokens, "stream": True, "temperature": 0}

    async def read() -> None:
        async with session.post(f"{address}/completions", json=body) as answer:
            async for _ in answer.content.iter_any():
                sizes.append(resident(process))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        started = time.perf_counter()
        await asyncio.gather(*(read() for _ in range(count)))
        speed = count * tokens / (time.perf_counter() - started)
    return speed, statistics.median(sizes)


def serve(name: str, repeats: int) -> None:
    """Compare the tokens per second of 64 clients of a server with those of one. The memory for a further client is the
    slope of the line through the memory with 64 and more clients: what a call of the model needs is that of 64 rows,
    however many there are."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=server, args=(name, theirs), daemon=True)
    process.start()
    address, number = ours.recv(), process.pid
    assert number is not None
    # one client with a long prompt needs the memory for a piece of prompts, which is there once, however many there are
    asyncio.run(read_streams(address, 1, number, prompt=10_000))
    before = peak(number)
    turns = [[asyncio.run(read_streams(address, count, number)) for count in CLIENTS] for _ in range(repeats)]
    most = (peak(number) - before) / (CLIENTS[-1] - 1) / 1024
    process.kill()
    one, many = (statistics.median(turn[i][0] for turn in turns) for i in (0, 1))
    ratio = statistics.median(turn[1][0] / turn[0][0] for turn in turns)
    sizes = [size / 1024 for turn in turns for _, size in turn[1:]]
    slope, _ = statistics.linear_regression(CLIENTS[1:] * repeats, sizes)
    with torch.inference_mode():
        state = states.num_bytes(model(name).eval().extend_hidden(torch.ones(1, 100, dtype=torch.long))[1]) / 1024
    print(f"{name:24} one client {one:,.0f} tokens/s, {CLIENTS[1]} clients {many:,.0f}: {ratio:.1f} ×")
    further = f"{slope:,.0f} KiB for each further client, state + {slope - state:,.0f} KiB (peak {most:,.0f})"
    print(f"{name:24} {further}", flush=True)


def resident(process: int) -> float:
    """Return the bytes that a process has in memory, 0 where the system does not say."""
    file = Path(f"/proc/{process}/statm")
    return 4096 * float(file.read_text().split()[1]) if file.exists() else 0.0


def peak(process: int | str = "self") -> float:
    """Return the most bytes that a process had in memory; only Linux knows it for another one."""
    if (status := Path(f"/proc/{process}/status")).exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * float(line.split()[1])
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", type=names_from(PARTS), default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=LINEAR)
    parser.add_argument("--train", nargs=3, metavar=("MODEL", "TOKENS", "SEGMENT"), help="one step, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.train:
        name, tokens, segment = arguments.train
        train(name, int(tokens), int(segment))
        return
    if "reading" in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            for name in arguments.models:
                reading(name, arguments.tokens, arguments.repeats, Path(folder))
    if "back" in arguments.parts:
        for name in arguments.models:
            back(name, arguments.repeats)
    if "training" in arguments.parts:
        first = next(iter(MODELS))
        # a process each, as memory is the most that a process ever had
        for tokens, segment in ((16_384, 0), (16_384, SEGMENT), (131_072, SEGMENT), (1_048_576, SEGMENT)):
            print(f"training on {tokens:,} tokens, segments of {segment or tokens:,}: ", end="", flush=True)
            subprocess.run([sys.executable, __file__, "--train", first, str(tokens), str(segment)], check=True)
    for name in arguments.models:
        if "batches" in arguments.parts:
            batches(name, arguments.repeats)
        if "conversations" in arguments.parts:
            conversations(name)
        if "serve" in arguments.parts:
            serve(name, arguments.repeats)


if __name__ == "__main__":
    main()
