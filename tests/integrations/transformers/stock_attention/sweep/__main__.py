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
from typing import NoReturn

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
        results = results_of_process(name, kind)
        line = {"name": name, "kind": kind, "verdict": verdict(results), "outcomes": results}
        past[name] = line
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {check: each for check, each in results.items() if each != "equal"}
        print(line["verdict"], name, shown, file=sys.stderr, flush=True)
    lines = sorted(past.values(), key=lambda line: line["name"])
    print(Counter(line["verdict"] for line in lines))
    if options.page is not None:
        options.page.write_text(page(lines), "utf-8")
    if any(line["verdict"] in ("wrong", "error") for line in lines):
        sys.exit(1)


def results_of_process(name: str, kind: str) -> dict[str, str]:
    """Return the outcomes of a class from a process of its own. It is killed if the checks of the model's own attention
    take too long, or those of ours; only what happens with ours is an error."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _send_outcomes(name, kind, write)
    os.close(write)
    with open(read) as file:
        results: dict[str, str] = dict(map(json.loads, file))
    status = os.waitpid(child, 0)[1]
    if status:
        end = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        reason = f"not done in {SECONDS} seconds" if status == signal.SIGALRM else f"the process ended with {end}"
        results["process"] = f"{'error' if results else 'not run'}: {reason}"
    return results


def _send_outcomes(name: str, kind: str, write: int) -> NoReturn:
    signal.alarm(SECONDS)
    with open(write, "w", buffering=1) as file:
        try:
            for check, result in outcomes(name, kind):
                file.write(json.dumps((check, result)) + "\n")
                if check == "build":
                    signal.alarm(SECONDS)
        # nothing may go on in this copy of the process
        except BaseException as error:
            file.write(json.dumps(("process", f"error: {type(error).__name__}: {error}")) + "\n")
        finally:
            file.close()
            os._exit(0)


if __name__ == "__main__":
    main()
