"""The bits per byte of short and long runs of `linattn train`, over learning rates and warm-ups.

    python benchmarks/learning_rates.py tinyshakespeare.txt --steps 200 --lr 1e-3,3e-3 [--warmup default,0.05] [OPTIONS]

Other OPTIONS, such as `--dim 64`, go to each run. A row is printed as soon as its run is complete; the
command's progress goes to stderr. OMP_NUM_THREADS=1 makes runs equal bit by bit."""

import argparse
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

from linattn.cli.argument_types import comma_separated, counts
from linattn.cli.main import main as linattn
from linattn.cli.run_folder import open_run


def bits_per_byte(arguments: list[str]) -> float:
    """Train with the arguments of the command, and return the last validation's bits per byte."""
    with TemporaryDirectory() as folder:
        if status := linattn(["train", *arguments, "--out", f"{folder}/run"]):
            raise SystemExit(status)
        records = list(open_run(Path(folder) / "run").records())
    return [record["validation_bits_per_byte"] for record in records if "validation_bits_per_byte" in record][-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--steps", type=counts, default=(200,))
    parser.add_argument("--lr", type=comma_separated, default=("1e-3", "2e-3", "3e-3"))
    parser.add_argument("--warmup", type=comma_separated, default=("default",), help="shares, and `default`")
    parser.add_argument("--seeds", type=comma_separated, default=("0",))
    own, options = parser.parse_known_args()
    print("| steps | seed | learning rate | warm-up | bits per byte |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    for steps, seed, lr, warmup in itertools.product(own.steps, own.seeds, own.lr, own.warmup):
        given = {"--steps": str(steps), "--evaluate-every": str(steps), "--lr": lr, "--seed": seed}
        if warmup != "default":
            given["--warmup"] = warmup
        bits = bits_per_byte([own.data, *itertools.chain(*given.items()), *options])
        print(f"| {steps:,} | {seed} | {lr} | {warmup} | {bits:.3f} |", flush=True)


if __name__ == "__main__":
    main()
