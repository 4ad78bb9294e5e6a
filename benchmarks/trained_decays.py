"""The time of decays per channel as a trained model has them: with leaves of 16 tokens, and with leaves of one token.

    linattn train tinyshakespeare.txt --out RUN --attention gla --convolution-on inputs --gate --context 256 \
        --batch 8 --minutes 4
    python benchmarks/trained_decays.py RUN [RUN ...] [--tokens 2048] [--repeats 7]

The decays are those that the model's gates compute on held-out text; queries, keys and values are random. Times are
medians of processor time of one thread, in turns."""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from second_generation import processor_time, with_gradients, without_gradients
from torch import Tensor
from torch.nn.functional import normalize

from linattn.cli.run_folder import open_run
from linattn.data.windows import window
from linattn.nn.gates import ChannelDecay, SigmoidDecay
from linattn.ops import causal_delta_attention, causal_linear_attention
from linattn.ops.fast import decays


def trained_decays(folder: Path, n: int) -> list[Tensor]:
    """Return the logarithms of decays of each layer, (1, heads, n, d), on n held-out tokens."""
    run, layers = open_run(folder), list[Tensor]()
    model = run.model().eval()
    for module in model.modules():
        if isinstance(module, (ChannelDecay, SigmoidDecay)):
            module.register_forward_hook(lambda _, __, log_decay: layers.append(log_decay.detach().contiguous()))
    with torch.no_grad():
        model(window(run.tokens("validation"), 0, n)["input_ids"].unsqueeze(0))
    return layers


def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, log_decay=log_decay, normalize=None)[0]


def kda(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return causal_delta_attention(q, k, v, beta, log_decay=log_decay)[0]


def compare(attention: Callable[..., Tensor], log_decay: Tensor, work: str, repeats: int) -> float:
    """Return the time with leaves of one token over that with leaves of 16."""
    q, k, v, upstream = (torch.randn_like(log_decay) for _ in range(4))
    given = [normalize(q, dim=-1), normalize(k, dim=-1), v, log_decay, torch.rand(log_decay.shape[:-1])]
    given = [x.requires_grad_() for x in given[: 5 if attention is kda else 4]]

    def operator(*tensors: Tensor) -> Tensor:
        return attention(*tensors, *([] if attention is kda else [tensors[-1]]))

    call = without_gradients(operator, given) if work == "forward" else with_gradients(operator, given, upstream)
    times: dict[int, list[float]] = {1: [], 16: []}
    for turn in range(repeats + 1):
        for decays.LEAF in times:
            seconds = processor_time(call)
            # the first turn warms up
            times[decays.LEAF] += [seconds] if turn else []
    return statistics.median(times[1]) / statistics.median(times[16])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for folder in options.runs:
        for i, log_decay in enumerate(trained_decays(folder, options.tokens)):
            least, median = log_decay.min(), log_decay.median()
            print(f"{folder.name}  layer {i}  log decays: least {least:.2f}, median {median:.3f}", end="", flush=True)
            for attention in (gla, kda):
                ratios = (compare(attention, log_decay, work, options.repeats) for work in ("forward", "training"))
                print(f"  {attention.__name__} {' and '.join(f'{x:.2f}' for x in ratios)} ×", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
