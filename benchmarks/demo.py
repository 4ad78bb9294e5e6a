"""`make demo`'s training with other attentions and options, each for as long: bits per byte, and what it costs to read
the last bytes alone: 24 to 31, or 3 to 4 windows of `--window`.

    python benchmarks/demo.py [--variants demo,softmax] [--seeds 0,1] [--context 512 --batch 4 --lr 3e-3 …]

Other options, those of `linattn train`, go to each run. A row is printed as soon as its run is complete; the command's
progress goes to stderr. Run it on a quiet machine, because a run ends after its minutes."""

import argparse
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

from linattn.cli.argument_types import comma_separated, names_from
from linattn.cli.demo import bits_without_states, train
from linattn.cli.run_folder import open_run

VARIANTS = {
    "demo": "",
    "softmax": "--attention softmax",
    "softmax-inputs": "--attention softmax --convolution-on inputs",
    "window": "--attention local --convolution-on projections --induction",
    "local+elu": "--attention local:2+elu:2",
    "gated_delta": "--attention gated_delta",
    "kda": "--attention kda,kda,kda,local",
    "inputs": "--convolution-on inputs",
    "window64": "--window 64",
    "heads2": "--num-heads 2",
    "untied": "--no-tie-embeddings",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", type=names_from(tuple(VARIANTS)), default=tuple(VARIANTS))
    parser.add_argument("--seeds", type=comma_separated, default=("0",))
    own, options = parser.parse_known_args()
    print("| variant | seed | steps | bits per byte | bits with the whole past | bits with a short past | worth |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for seed, name in itertools.product(own.seeds, own.variants):
        with TemporaryDirectory() as folder:
            if status := train(f"{folder}/run", *VARIANTS[name].split(), "--seed", seed, *options):
                raise SystemExit(status)
            run = open_run(Path(folder) / "run")
            bits = [record for record in run.records() if "validation_bits_per_byte" in record][-1]
            _, _, whole, short = bits_without_states(run)
        figures = f"{bits['step']:,} | {bits['validation_bits_per_byte']:.3f} | {whole:.3f} | {short:.3f}"
        print(f"| {name} | {seed} | {figures} | {short - whole:+.3f} |", flush=True)


if __name__ == "__main__":
    main()
