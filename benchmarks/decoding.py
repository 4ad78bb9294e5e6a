"""The time that guesses and a compiled step save in generation, on one thread, in seconds of the process.

    python benchmarks/decoding.py runs/demo [--repeats 5] [--parts lookup,compiled]

The model is that of a run, such as that of `make demo`: guesses are right where a trained model repeats itself. Ratios
are medians of turns, with the prompt's time in both."""

import argparse
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from linattn import LanguageModel, PromptLookup, Sampling, generate
from linattn.cli.argument_types import names_from

# files of Python's standard library, of which some bytes go before the new ones
CODE = ("argparse.py", "ast.py", "dis.py", "enum.py", "heapq.py", "opcode.py", "subprocess.py", "token.py")
REPEATS = b"".join(b"    def test_%d(self):\n        self.assertEqual(first(%d), 1)\n\n" % (i, i) for i in range(30))
PARTS = ("lookup", "compiled")


def seconds(model: LanguageModel, prompt: bytes, **options: Any) -> float:
    started = time.process_time()
    generate(model, list(prompt), **options)
    return time.process_time() - started


def lookup(model: LanguageModel, repeats: int) -> None:
    """Compare generation with and without guesses from the text, for the most likely tokens and for draws."""
    library = Path(sysconfig.get_paths()["stdlib"])
    prompts = {"a text that repeats": REPEATS} | {name: (library / name).read_bytes()[500:2000] for name in CODE}
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 600, "sampling": Sampling(temperature=temperature), "seed": 0}
        for name, prompt in prompts.items():
            ratios, draft = list[float](), PromptLookup()
            for _ in range(repeats):
                plain = seconds(model, prompt, **options)
                ratios.append(plain / seconds(model, prompt, draft=draft, **options))
            right = f"{draft.accepted / repeats:.0f} of {draft.drafted / repeats:.0f} guesses right"
            print(f"temperature {temperature}, {name:20} {statistics.median(ratios):5.2f} ×, {right}", flush=True)


def compiled(model: LanguageModel, repeats: int) -> None:
    """Compare a token with and without a compiled step."""
    started, count = time.perf_counter(), 400
    generate(model, list(REPEATS[:100]), max_new_tokens=3, compile=True)
    first, turns = time.perf_counter() - started, list[tuple[float, float]]()
    for _ in range(repeats):
        plain, fast = (seconds(model, REPEATS[:100], max_new_tokens=count, compile=each) for each in (False, True))
        turns.append((1000 * plain / count, 1000 * fast / count))
    plain, fast = (statistics.median(times) for times in zip(*turns, strict=True))
    ratio = statistics.median(x / y for x, y in turns)
    print(f"a token {plain:.2f} ms, compiled {fast:.2f} ms: {ratio:.1f} ×, after {first:.0f} s for the first call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", type=names_from(PARTS), default=PARTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = LanguageModel.load(arguments.run)
    for part in (lookup, compiled):
        if part.__name__ in arguments.parts:
            part(model, arguments.repeats)


if __name__ == "__main__":
    main()
