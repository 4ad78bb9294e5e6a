"""Run every check on every class, each class in a process of its own, and write the page of documentation.

    python -m tests.integrations.transformers.stock_attention.sweep [--only REGEX] [--results FILE] [--page FILE]

Classes whose outcomes are in the file of results are not run again."""

import argparse
import json
import os
import re
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

from .outcomes import outcomes, verdict
from .page import page
from .small_models import classes

SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/sweep.jsonl"))
    parser.add_argument("--only", default="", help="a regular expression of class names")
    parser.add_argument("--page", type=Path, help="write this page from all results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    past = {}
    if options.results.exists():
        past = {line["name"]: line for line in map(json.loads, options.results.read_text().splitlines())}
    for name, kind in classes().items():
        if name in past or not re.search(options.only, name):
            continue
        found = _in_a_process(name, kind)
        line = {"name": name, "kind": kind, "verdict": verdict(found), "outcomes": found}
        past[name] = line
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {check: each for check, each in found.items() if each != "equal"}
        print(line["verdict"], name, shown, file=sys.stderr, flush=True)
    lines = sorted(past.values(), key=lambda line: line["name"])
    print(Counter(line["verdict"] for line in lines))
    if options.page is not None:
        options.page.write_text(page(lines), "utf-8")
    if any(line["verdict"] in ("wrong", "error") for line in lines):
        sys.exit(1)


def _in_a_process(name: str, kind: str) -> dict[str, str]:
    """Return the outcomes of a class, found in a process that is killed when its time is over."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        os.write(write, json.dumps(outcomes(name, kind)).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"build": f"not run: not done in {SECONDS} seconds"}


if __name__ == "__main__":
    main()
