"""`make demo`: train for two minutes on the sources of Python's standard library, measure what the states hold of the
past, then generate from the model."""

import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from linattn.cli.main import main
from linattn.cli.run_folder import Run, open_run
from linattn.models import LanguageModel

RUN, TOKENS_PER_CALL = "runs/demo", 8_192
# folders that hold no programs, or exist on some machines only
EXCLUDED = "test tests idlelib lib2to3 encodings pydoc_data site-packages dist-packages config-*"
# small, so that two cores have time for many updates
MODEL = "--dim 128 --depth 4 --num-heads 4 --window 8"
TRAINING = "--minutes 2 --context 2048 --batch 1 --evaluate-tokens 65536"
PROMPT = 'def read_config(path):\n    """'


def run() -> int:
    if status := train(RUN, "--replace"):
        return status
    print(f"\n{report(open_run(Path(RUN)))}\n", flush=True)
    return main(["generate", RUN, "--prompt", PROMPT, "--max-new-tokens", "600", "--temperature", "0.6", "--seed", "0"])


def train(out: str, *options: str) -> int:
    """Run `linattn train` on the standard library, and return its exit status. The `options` win over the demo's."""
    library = sysconfig.get_paths()["stdlib"]
    data = [library, "--include=*.py", *(f"--exclude={name}" for name in EXCLUDED.split())]
    return main(["train", *data, "--out", out, *MODEL.split(), *TRAINING.split(), *options])


def report(run: Run) -> str:
    """Return the bits per byte of the last validation, and what they would be without the states of linear layers."""
    bits = [record[name] for record in run.records() if (name := "validation_bits_per_byte") in record]
    past, block, whole, short = bits_without_states(run)
    return (
        f"validation: {bits[-1]:.3f} bits per byte\n"
        f"from byte {past + 1} of each sequence on: {whole:.3f} with all bytes before in the sequence, "
        f"{short:.3f} with the last {past} to {past + block - 1} alone\n"
        f"the states of the linear layers, which alone hold older bytes, are worth {short - whole:.3f} bits per byte"
    )


def bits_without_states(run: Run) -> tuple[int, int, float, float]:
    """Return the number of bytes in a short past, the number of bytes that share one, and the bits per byte of the
    validation's windows with the whole window as past and with a short one. The short past has three times the bytes of
    the model's attention windows, so that nothing but the states of its linear layers can hold older ones."""
    from linattn.data.windows import validation_windows

    model, options = run.model(), run.description["options"]
    block, past = model.config.window, 3 * model.config.window
    most = options["evaluate_tokens"] // options["context"]
    chosen = validation_windows(run.tokens("validation"), options["context"], most=most)
    windows = torch.stack([window["input_ids"] for window in chosen])
    # whole blocks, so that both figures are those of the same bytes
    windows = windows[:, : windows.shape[1] - (windows.shape[1] - past) % block]
    whole, short = (
        bits_after(model, part, past).mean().item()
        for part in (windows, windows.unfold(1, past + block, block).flatten(0, 1))
    )
    return past, block, whole, short


@torch.no_grad()
def bits_after(model: LanguageModel, windows: Int[Tensor, "b n"], past: int) -> Float[Tensor, "b m"]:
    """Return the bits of the tokens of each window after the first `past` ones."""
    bits = [
        F.cross_entropy(model(part[:, :-1])[:, past - 1 :].mT.float(), part[:, past:], reduction="none")
        for part in windows.split(max(1, TOKENS_PER_CALL // windows.shape[1]))
    ]
    return torch.cat(bits) / math.log(2)


if __name__ == "__main__":
    sys.exit(run())
