"""Bits per byte against the position in a document that is read from its beginning: what is a long past worth?

Trains by `linattn train` on Python's standard library, with and without `--carry`, and reads held-out files: whole, and
each part of them from 256 bytes before it, as if there were no longer past. It also says what
lookups in the far past would save, and reads a passage again after some other text. With `--renamed` each document has
names of its own, which only its past can tell. A run is a line of JSON; what the file has is not run again. The tables
and the picture, which is of the first of them, go into the page.

    python -m examples.learning.positions --method hybrid gated_delta --carry 0 0.9 --out docs/positions.jsonl
    python -m examples.learning.positions --out docs/positions.jsonl --page docs/learning.md"""

import argparse
import builtins
import io
import keyword
import math
import random
import re
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.arguments import existing
from examples.learning.lookups import matches, mixture_bits
from examples.learning.report import markdown, replaced
from examples.learning.run import append, read
from linattn import LanguageModel
from linattn.cli.argument_types import COUNT, POSITIVE, SEED, numbers
from linattn.cli.demo import EXCLUDED, bits_after
from linattn.cli.main import main as linattn
from linattn.cli.vocabulary import Bytes

EDGES = (0, 256, 1_024, 4_096, 16_384, 65_536)
RANGES = list(pairwise(EDGES))
# every 12th file is held out; those of at least 16,384 bytes are read, so that the same files are in all ranges but one
HELD_OUT, SHORTEST = 12, 16_384
# bytes of a past that is cut off, and one part in so many of those that are read in this way
SHORT_PAST, EVERY = 256, {1_024: 1, 4_096: 4, 16_384: 8}
# bytes of a passage that is read twice, and of another document between the two
PASSAGE, GAPS = 128, (64, 1_024, 4_096, 16_384)
# what keeps its name with `--renamed`, as do names of fewer letters
KEPT, FEWEST_LETTERS = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self"}, 4
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"

# what the table has of the worth of a past, by the record's names
WORTH = {"short_past": "past", "lookup": "lookups"}

CARRY = numbers(lambda x: 0 <= x < 1, "of at least 0 and below 1")
SIZES, BATCH, RATE = "--dim 128 --num-heads 4 --window 64", 2_048, 5e-3
METHODS = {
    # the command's own choice
    "hybrid+induction": "",
    "hybrid+keys128+induction": "--key-dim 128",
    "hybrid+keys256+induction": "--key-dim 256",
    "hybrid": "--no-induction",
    "hybrid+keys128": "--key-dim 128 --no-induction",
    "softmax": "--attention softmax --no-induction",
    "local": "--attention local --convolution-on projections",
    "local+elu": "--attention local:2+elu:2 --convolution-on projections",
    "retention": "--attention retention --convolution-on projections --rotary none --head-norm",
    **{name: f"--attention {name} --no-induction" for name in ("gated_delta", "ssd", "gla", "kda")},
}


def split() -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those that are held out, as the demo finds them."""
    folder, excluded = Path(sysconfig.get_paths()["stdlib"]), EXCLUDED.split()
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    files = [folder / name for name in names if not any(Path(part).match(x) for part in name.parts for x in excluded)]
    return [file for i, file in enumerate(files) if i % HELD_OUT], files[::HELD_OUT]


def renamed(text: bytes, rng: random.Random) -> bytes:
    """Return a Python file in which each name that its code has is replaced, everywhere alike, by a random one as long;
    the words of the language, special names and names of few letters stay."""
    code = tokenize.tokenize(io.BytesIO(text).readline)
    names = {token.string for token in code if token.type == tokenize.NAME and token.string not in KEPT}
    chosen: dict[str, str] = {}
    for name in sorted(name for name in names if name.isascii() and not name.startswith("__")):
        if sum(map(str.isalpha, name)) >= FEWEST_LETTERS:
            while (other := _made_up(name, rng)) in {*names, *chosen.values()}:
                pass
            chosen[name] = other
    return re.sub(rb"\w+", lambda word: chosen.get(word[0].decode(), word[0].decode()).encode(), text)


def _made_up(name: str, rng: random.Random) -> str:
    """Return a name that can be spoken, with capitals, digits and underscores where the other has them."""
    letters = (rng.choice(VOWELS if i % 2 else CONSONANTS) for i in range(len(name)))
    return "".join(
        (new.upper() if old.isupper() else new) if old.isalpha() else old
        for old, new in zip(name, letters, strict=True)
    )


def renamed_files(files: Sequence[Path], folder: Path) -> list[Path]:
    """Write the files with names of their own into a folder, and return their paths."""
    folder.mkdir()
    paths = [folder / f"{number}.py" for number in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(renamed(file.read_bytes(), random.Random(f"{folder.name} {path.name}")))
    return paths


def documents(files: Sequence[Path]) -> Iterator[Tensor]:
    """Yield the tokens of files that are long enough, each after a separator, up to the last range."""
    for file in files:
        text = file.read_bytes()
        if len(text) >= SHORTEST:
            yield torch.tensor([Bytes.separator, *text[: EDGES[-1]]])


@torch.no_grad()
def bits_of(model: LanguageModel, tokens: Tensor, *, piece: int = 2_048) -> Tensor:
    """Return the bits of each token but the first, read from the beginning."""
    state, bits = None, []
    for start in range(0, len(tokens) - 1, piece):
        targets = tokens[start + 1 : start + piece + 1]
        logits, state = model.extend(tokens[None, start : start + len(targets)], state)
        bits.append(F.cross_entropy(logits[0].float(), targets, reduction="none") / math.log(2))
    return torch.cat(bits)


def bits_after_short_past(model: LanguageModel, tokens: Tensor, starts: Sequence[int]) -> Tensor:
    """Return the bits of the parts of `SHORT_PAST` tokens from each start on, after as many other tokens."""
    windows = torch.stack([tokens[start - SHORT_PAST : start + SHORT_PAST] for start in starts])
    return bits_after(model, windows, SHORT_PAST)


def measure(model: LanguageModel, texts: Sequence[Tensor], last: int) -> list[dict[str, Any]]:
    """Return for each range of positions up to `last` the mean bits; how many fewer some parts of it have with the
    whole past than with a short one; and how many fewer the short past has with lookups in all of the past than with
    lookups in itself."""
    sums = [torch.zeros(5, dtype=torch.float64) for _ in RANGES]
    looked_up = [list[tuple[Tensor, ...]]() for _ in RANGES]
    for number, tokens in enumerate(texts):
        bits, text = bits_of(model, tokens[: last + 1]), bytes(tokens[1:].tolist())
        for total, parts, (begin, end) in zip(sums, looked_up, RANGES, strict=True):
            part = bits[begin:end]
            total[:2] += torch.tensor([part.sum(), len(part)])
            # byte i is token i + 1
            starts = range(begin + 1, min(end, len(bits)) - SHORT_PAST + 2, SHORT_PAST * EVERY.get(begin, 1))
            if begin in EVERY and len(starts):
                short = bits_after_short_past(model, tokens, starts)
                full = torch.stack([bits[start - 1 : start - 1 + SHORT_PAST] for start in starts])
                total[2:] += torch.tensor([full.sum(), short.sum(), short.numel()])
                parts.extend(_lookups(text, start, each, number) for start, each in zip(starts, short, strict=True))
    return [
        {
            "from": begin,
            "to": end,
            "bits": round(float(total[0] / total[1]), 4),
            "bytes": int(total[1]),
            **({"short_past": round(float(total[3] - total[2]) / float(total[4]), 4)} if total[4] else {}),
            **({"lookup": round(_far_lookups(parts), 4)} if parts else {}),
        }
        for total, parts, (begin, end) in zip(sums, looked_up, RANGES, strict=True)
        if total[1]
    ]


def _lookups(text: bytes, start: int, bits: Tensor, document: int) -> tuple[Tensor, ...]:
    """Return for each byte from token `start` on its probability, which the `bits` say, the document's number, and the
    matches in the short past and in all of the past."""
    first = start - 1
    near, far = (matches(text, range(first, first + len(bits)), begin) for begin in (first - SHORT_PAST, 0))
    return bits.double().neg().exp2(), torch.full_like(bits, document).long(), *near, *far


def _far_lookups(parts: Sequence[tuple[Tensor, ...]]) -> float:
    own, document, *found = (torch.cat(each) for each in zip(*parts, strict=True))
    near, far = (mixture_bits(own, *each, document) for each in (found[:2], found[2:]))
    return near - far


def repeats(model: LanguageModel, texts: Sequence[Tensor], last: int) -> list[dict[str, Any]]:
    """Return for each gap up to `last` how many bits per byte a passage that comes again after it has less than where
    it comes for the first time; passages are from the middle of the next document."""
    found = []
    for gap in (gap for gap in GAPS if gap <= last):
        again, first = [], []
        for tokens, other in zip(texts, [*texts[1:], texts[0]], strict=True):
            middle = len(other) // 2
            passage, between = other[middle : middle + PASSAGE], tokens[1 : gap + 1]
            again.append(bits_of(model, torch.cat([tokens[:1], passage, between, passage]))[-PASSAGE:])
            first.append(bits_of(model, torch.cat([tokens[:1], between, passage]))[-PASSAGE:])
        saved = (torch.cat(first) - torch.cat(again)).mean()
        found.append({"gap": gap, "saved": round(float(saved), 4)})
    return found


def train(method: str, carry: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one run."""
    training, held_out = split()
    steps = options.steps
    with tempfile.TemporaryDirectory() as folder:
        if options.renamed:
            training, held_out = (
                renamed_files(files, Path(folder, name))
                for name, files in (("training", training), ("held out", held_out))
            )
        texts, run = list(documents(held_out)), f"{folder}/run"
        words = f"{SIZES} {METHODS[method]} --cpu --seed {seed} --depth {options.depth} --steps {steps}"
        words += f" --context {options.context} --batch {max(1, BATCH // options.context)} --lr {options.lr}"
        words += f" --evaluate-every {steps} --evaluate-tokens 65536 --save-every {steps} --log-every 100"
        words += f" --carry {carry}" if carry else ""
        words += f" --segment {options.segment}" if options.segment else ""
        before = time.process_time()
        data = [*map(str, training), *(f"--validation-data={file}" for file in held_out)]
        if status := linattn(["train", *data, "--out", run, *words.split()]):
            raise SystemExit(status)
        seconds = time.process_time() - before
        model = LanguageModel.load(run)
    # softmax keeps every key, and is far from what it was trained on
    last = EDGES[-3] if method == "softmax" else EDGES[-1]
    measured = {"ranges": measure(model, texts, last), "repeats": repeats(model, texts, last)}
    return key(method, carry, seed, options) | {"cpu_seconds": round(seconds), **measured}


def key(method: str, carry: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in ("depth", "context", "segment", "steps", "lr", "renamed")}
    return {"method": method, "carry": carry, "seed": seed, **settings}


def label(range_: dict[str, Any]) -> str:
    return "–".join(_short(edge) for edge in (range_["from"], range_["to"]))


def _short(count: int) -> str:
    return f"{count // 1024} k" if count >= 1024 else str(count)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a row per number of updates, context and, in brackets, segment, method, learning rate and share of
    `--carry`, in this order; seeds are side by side."""
    figures = [
        *((label(each), "ranges", number, "bits", "{:.3f}") for number, each in enumerate(_longest(runs))),
        *(
            (f"{title}, {label(each)}", "ranges", number, name, "{:+.3f}")
            for name, title in WORTH.items()
            for number, each in enumerate(_longest(runs))
            if any(name in one for run in runs for one in run["ranges"][number : number + 1])
        ),
        *((f"again after {_short(gap)}", "repeats", number, "saved", "{:+.3f}") for number, gap in enumerate(GAPS)),
    ]
    lines = [["method", "updates", "context", "rate", "`--carry`", *(title for title, *_ in figures), "CPU s"]]
    in_order = sorted(runs, key=lambda run: (*_place(run), run["seed"]))
    for (steps, context, segment, _, rate, carry), group in groupby(in_order, key=_place):
        seeds = list(group)
        seconds = " / ".join(str(run["cpu_seconds"]) for run in seeds)
        length = f"{context:,}" + f" ({segment:,})" * (segment > 0)
        row = [seeds[0]["method"], f"{steps:,}", length, f"{rate:g}", f"{carry:g}" if carry else ""]
        lines.append([*row, *(_cells(seeds, *place) for _, *place in figures), seconds])
    return markdown(lines)


def texts_of(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each text that has any: figures of different texts are not compared."""
    texts: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        texts.setdefault("positions-renamed" if run.get("renamed") else "positions", []).append(run)
    return texts


def with_tables(page: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the page with the tables of the runs in the place of what was there."""
    for name, group in texts_of(runs).items():
        page = replaced(page, name, table(group))
    return page


def _place(run: dict[str, Any]) -> tuple[int, int, int, int, float, float]:
    """Return what a row of the table is placed by."""
    method, segment = list(METHODS).index(run["method"]), run.get("segment") or 0
    return run["steps"], run["context"], segment, method, run["lr"], run["carry"]


def _longest(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return max((run["ranges"] for run in runs), key=len)


def _cells(runs: Sequence[dict[str, Any]], part: str, number: int, name: str, form: str) -> str:
    found = [run[part][number].get(name) for run in runs if number < len(run[part])]
    return " / ".join(form.format(figure) for figure in found if figure is not None)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the bits in each range, how many of them the past beyond 256 bytes saves, and how many of a passage its
    first reading; with --carry dashed. Only the first seed of runs with the shortest context and of those with more
    updates than others is drawn, with the usual learning rate, without --carry and with the share 0.9. Softmax, which
    fails beyond its context, may leave the picture."""
    from examples.learning.curves import plt, styles
    from examples.pictures import save

    plt.rcParams["font.size"] = 11
    figure, panels = plt.subplots(1, 3, figsize=(18, 4.4), layout="constrained")
    shortest, fewest = (min(run[name] for run in runs) for name in ("context", "steps"))
    shown = [run for run in runs if run["context"] == shortest or run["steps"] > fewest]
    shown = [run for run in shown if (run["seed"], run["lr"]) == (0, RATE) and run["carry"] in (0, 0.9)]

    def name(run: dict[str, Any]) -> str:
        longer = f", {run['steps']:,} updates" * (run["steps"] > fewest)
        return run["method"] + longer + f", context {run['context']:,}" * (run["context"] > shortest)

    style = styles(dict.fromkeys(name(run) for run in sorted(shown, key=_place)))
    for axes, (title, curve) in zip(panels, CURVES.items(), strict=True):
        for run in shown:
            look = style[name(run)] | ({"linestyle": "--", "markerfacecolor": "none"} if run["carry"] else {})
            axes.plot(*zip(*curve(run), strict=True), **look)
        bounded = [run for run in shown if run["method"] != "softmax"] or shown
        figures = [figure for run in bounded for _, figure in curve(run)]
        margin = 0.2 * (max(figures) - min(figures)) + 1e-3
        axes.set_ylim(min(figures) - margin, max(figures) + margin)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel("position in the document (dashed: with --carry)")
        axes.axhline(0, color="#bbbbbb", zorder=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("bytes between the two readings")
    for text, look in style.items():
        panels[0].plot([], [], label=text, **look)
    figure.legend(loc="outside right center", frameon=False, fontsize=10)
    save(figure, path)
    plt.close(figure)


def _points(run: dict[str, Any], name: str) -> list[tuple[str, float]]:
    return [(label(each), each[name]) for each in run["ranges"] if name in each]


# what a panel shows of a run, by its title
CURVES: dict[str, Callable[[dict[str, Any]], list[tuple[str, float]]]] = {
    "bits per byte, read from the beginning": partial(_points, name="bits"),
    "bits that the past beyond 256 bytes saves": partial(_points, name="short_past"),
    "bits saved by reading a passage again": lambda run: [(_short(x["gap"]), x["saved"]) for x in run["repeats"]],
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=[])
    parser.add_argument("--carry", nargs="+", **CARRY, default=[0.0, 0.9], help="0: without --carry")
    parser.add_argument("--seed", nargs="+", **SEED, default=[0])
    parser.add_argument("--depth", **COUNT, default=4)
    parser.add_argument("--context", **COUNT, default=256)
    parser.add_argument("--segment", **COUNT, help="tokens that keep their activations at once (default: all)")
    parser.add_argument(
        "--renamed", action="store_const", const=True, help="give each document made-up names, which no other has"
    )
    parser.add_argument("--steps", **COUNT, default=600)
    parser.add_argument("--lr", **POSITIVE, default=RATE)
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--page", type=existing, help="the page whose table and picture show the file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for seed in options.seed:
        for method in options.method:
            for carry in options.carry:
                wanted = key(method, carry, seed, options)
                if not any(all(run.get(name) == wanted[name] for name in wanted) for run in read(options.out)):
                    append(options.out, train(method, carry, seed, options))
    if options.page:
        runs = read(options.out)
        options.page.write_text(with_tables(options.page.read_text("utf-8"), runs), "utf-8")
        draw(texts_of(runs).get("positions", runs), options.page.with_name(f"{options.page.stem}-positions.svg"))


if __name__ == "__main__":
    main()
