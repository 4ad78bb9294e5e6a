"""The default language model with different attentions: training, prompts, and generated tokens.

    python benchmarks/language_models.py [--methods softmax,local+elu,elu] [--dtypes float32,bfloat16] [--json FILE]

Time and memory are measured as `linattn bench` does it, and --help lists its options. A step of training is the loss,
its gradients and a step of AdamW, in half precision by autocast, as in `linattn train`. A prompt is read, and its first
new token is generated. A generated token is measured at the --lengths and the --positions of the text; softmax has a
cache that grows. `linattn bench --redraw FILE` draws the record."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from linattn.cli.argument_types import METHODS, counts
from linattn.cli.bench import SOFTMAX, add_conditions
from linattn.cli.bench.attentions import state_at
from linattn.cli.bench.command import case_groups
from linattn.cli.bench.measure import Workload, measure
from linattn.cli.bench.record import SECONDS, Case, Record, Setup, write_record
from linattn.cli.bench.report import aligned, printed
from linattn.generation import stream
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.models.loss import next_token_loss

TRAINING, PREFILL, DECODING = "model training", "model prefill", "model decoding"
VOCABULARY = 257


def prepare(setup: Setup, case: Case) -> Workload:
    torch.manual_seed(0)
    return WORKLOADS[case.workload](setup, case)


def training(setup: Setup, case: Case) -> Workload:
    model, tokens = language_model(setup, case, torch.float32).train(), token_ids(setup, case.n + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> object:
        optimizer.zero_grad()
        with torch.autocast(model.device.type, case.torch_dtype, enabled=case.torch_dtype != torch.float32):
            loss = next_token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        return optimizer.step()

    return Workload(step)


def prefill(setup: Setup, case: Case) -> Workload:
    model, tokens = language_model(setup, case, case.torch_dtype), token_ids(setup, case.n)
    return Workload(lambda: next(stream(model, tokens, max_new_tokens=1)))


@torch.no_grad()
def decoding(setup: Setup, case: Case) -> Workload:
    model, token = language_model(setup, case, case.torch_dtype), token_ids(setup, 1)
    state = state_at(lambda n: model.extend(token_ids(setup, n))[1], case.n, setup.window)
    return Workload(torch.inference_mode()(lambda: model.extend(token, state)), state)


WORKLOADS: dict[str, Callable[[Setup, Case], Workload]] = {TRAINING: training, PREFILL: prefill, DECODING: decoding}


def language_model(setup: Setup, case: Case, dtype: torch.dtype) -> LanguageModel:
    config = LanguageModelConfig(
        vocab_size=VOCABULARY,
        dim=setup.heads * setup.head_dim,
        num_heads=setup.heads,
        window=setup.window,
        attention=case.method,
    )
    return LanguageModel(config).to(device=setup.device, dtype=dtype).eval()


def token_ids(setup: Setup, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (setup.batch, n), generator=generator).to(setup.device)


def throughput(record: Record) -> str:
    """Return a table of tokens per second, for one generated token per call or all tokens of a sequence."""
    rows = [["tokens per second", "n", ""]]
    for each in record.measurements:
        if each.quantity == SECONDS:
            count = record.options["batch"] * (1 if each.workload == DECODING else each.n)
            name = f"{each.workload}, {each.dtype}: {each.method}"
            rows.append([name, f"{each.n:,}", f"{count / each.point.value:,.0f}"])
    return aligned(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = (SOFTMAX, "local+elu", "elu")
    parser.add_argument("--methods", type=METHODS, default=methods, metavar="A,B")
    parser.add_argument("--positions", type=counts, default=(1_000, 100_000), metavar="N,N", help="of generated tokens")
    parser.add_argument("--json", type=Path, help="write the record here too")
    add_conditions(parser)
    parser.set_defaults(heads=4, causal=True)
    options = vars(parser.parse_args())
    path, positions = options.pop("json"), {*options["lengths"], *options["positions"]}
    groups = case_groups(options | {"workloads": (TRAINING, PREFILL)})
    groups += case_groups(options | {"workloads": (DECODING,), "lengths": positions})
    record = measure(prepare, sorted(groups, key=lambda group: group[0].n), options)
    print(printed(record), throughput(record), sep="\n\n")
    if path:
        write_record(record, path)


if __name__ == "__main__":
    main()
