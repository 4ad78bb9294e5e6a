"""What the state as a value saves, on one thread: reading a text again, and the memory of training on a long sequence.

    python benchmarks/states.py [--tokens 100000] [--repeats 5]

The models have random weights, which take the same time as trained ones. Times are medians of turns."""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from linattn import LanguageModel, LanguageModelConfig, states
from linattn.models.loss import next_token_loss
from linattn.nn.modes import evaluating

MODELS = {
    "4 × 128, local:2+elu:2": {"dim": 128, "depth": 4, "num_heads": 4, "attention": "local:2+elu:2", "window": 64},
    "8 × 256, gated_delta": {"dim": 256, "depth": 8, "num_heads": 4, "attention": "gated_delta", "rotary": None},
    "8 × 256, local:2+elu:2": {"dim": 256, "depth": 8, "num_heads": 4, "attention": "local:2+elu:2", "window": 64},
}
SEGMENT = 2048


def model(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(vocab_size=257, **MODELS[name]))


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


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


def peak() -> float:
    """Return the most bytes that this process had in memory."""
    if (status := Path("/proc/self/status")).exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * float(line.split()[1])
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", nargs=3, metavar=("MODEL", "TOKENS", "SEGMENT"), help="one step, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.train:
        name, tokens, segment = arguments.train
        train(name, int(tokens), int(segment))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            reading(name, arguments.tokens, arguments.repeats, Path(folder))
    first = next(iter(MODELS))
    # a process each, as memory is the most that a process ever had
    for tokens, segment in ((16_384, 0), (16_384, SEGMENT), (131_072, SEGMENT), (1_048_576, SEGMENT)):
        print(f"training on {tokens:,} tokens, segments of {segment or tokens:,}: ", end="", flush=True)
        subprocess.run([sys.executable, __file__, "--train", first, str(tokens), str(segment)], check=True)


if __name__ == "__main__":
    main()
