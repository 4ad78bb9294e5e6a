"""`make demo`: train for two minutes on the sources of Python's standard library, then generate from the model."""

import sys
import sysconfig
from pathlib import Path

from linattn.cli.main import main
from linattn.cli.run_folder import open_run

RUN = "runs/demo"
# folders that hold no programs, or exist on some machines only
EXCLUDED = "test tests idlelib lib2to3 encodings pydoc_data site-packages dist-packages config-*"
# small, so that two cores have time for many updates
MODEL = "--dim 128 --depth 4 --num-heads 4 --attention local:2+elu:2 --window 64 --convolution 4"
TRAINING = "--minutes 2 --context 256 --batch 8 --lr 5e-3 --evaluate-tokens 65536"
PROMPT = 'def read_config(path):\n    """'


def run() -> int:
    library = sysconfig.get_paths()["stdlib"]
    data = [library, "--include=*.py", *(f"--exclude={name}" for name in EXCLUDED.split())]
    if status := main(["train", *data, "--out", RUN, "--replace", *MODEL.split(), *TRAINING.split()]):
        return status
    bits = [record[name] for record in open_run(Path(RUN)).records() if (name := "validation_bits_per_byte") in record]
    print(f"\nvalidation: {bits[-1]:.3f} bits per byte\n", flush=True)
    return main(["generate", RUN, "--prompt", PROMPT, "--max-new-tokens", "600", "--temperature", "0.6", "--seed", "0"])


if __name__ == "__main__":
    sys.exit(run())
