"""The times of the operator compiled by `torch.compile` and exported by `torch.export`, beside the library's own calls.

    python benchmarks/compiled.py [--repeats 9]

Training steps of small language models and of attention with exponential features are compiled; causal attention with
elu + 1 is exported for any length. Times are those of one thread in milliseconds, medians of turns: a machine that is
slow for a while is then slow for both."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from linattn import InnerAttention, LanguageModel, LanguageModelConfig, named_attention
from linattn.cli.bench.measure import interleaved_times

HEADS, HEAD_DIM = 8, 64
MODELS, MODEL_TOKENS = ("elu", "local+elu"), 512
FEATURES, FEATURE_TOKENS = ("exp", "favor"), 2_048
EXPORTED = 512, 2_048, 16_384


def attention(name: str) -> InnerAttention:
    return named_attention(name, num_heads=HEADS, head_dim=HEAD_DIM, causal=True)


def inputs(tokens: int, *, gradients: bool = False) -> list[Tensor]:
    return [torch.randn(1, HEADS, tokens, HEAD_DIM, requires_grad=gradients) for _ in range(3)]


def step(module: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    module(*given).square().mean().backward()


def exported(module: nn.Module) -> nn.Module:
    n = torch.export.Dim("n", min=2)
    return torch.export.export(module, tuple(inputs(EXPORTED[0])), dynamic_shapes=({2: n}, {2: n}, {2: n})).module()


def milliseconds(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    times = interleaved_times(dict(enumerate(calls)), repeats)
    return [1e3 * statistics.median(each) for each in times.values()]


def compare_compiled(name: str, module: nn.Module, given: Sequence[Tensor], tokens: int, repeats: int) -> None:
    calls = [partial(step, each, given) for each in (module, torch.compile(module))]
    start = time.perf_counter()
    calls[1]()
    seconds = time.perf_counter() - start
    own, compiled = milliseconds(calls, repeats)
    print(f"{name:10}{tokens:>7,} tokens, training: {own:6.1f} ms, compiled {compiled:6.1f} (in {seconds:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in MODELS:
        model = LanguageModel(LanguageModelConfig(vocab_size=256, attention=name))
        compare_compiled(name, model, [torch.randint(256, (1, MODEL_TOKENS))], MODEL_TOKENS, repeats)
    for name in FEATURES:
        compare_compiled(name, attention(name), inputs(FEATURE_TOKENS, gradients=True), FEATURE_TOKENS, repeats)
    own = attention("elu")
    program = exported(own)
    for tokens in EXPORTED:
        given = inputs(tokens)
        with torch.no_grad():
            assert (program(*given) - own(*given)).abs().max() < 1e-4
            times = milliseconds([partial(module, *given) for module in (own, program)], repeats)
        print(f"elu       {tokens:>7,} tokens, forward:  {times[0]:6.1f} ms, exported {times[1]:6.1f}")


if __name__ == "__main__":
    main()
