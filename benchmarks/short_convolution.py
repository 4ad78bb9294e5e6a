"""The short convolution beside the same sum in plain torch, and beside torch's depthwise convolution.

    python benchmarks/short_convolution.py [--width 4] [--repeats 15]

Times are processor times of one thread in milliseconds, medians of turns: a machine that is slow for a while is then
slow for all three, so read their ratios. Training is the forward and the gradients of inputs, weights and bias."""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import ShortConvolution

# batch, tokens, channels
SHAPES = (4, 2048, 256), (1, 16384, 512), (64, 1, 256)
# a turn lasts at least so many seconds
SPAN = 0.05


def operator(module: ShortConvolution, x: Tensor) -> Tensor:
    return module(x)


def shifted_sum(module: ShortConvolution, x: Tensor) -> Tensor:
    """Add the shifted inputs one by one, as a formula in torch would."""
    inputs, y = F.pad(x, (0, 0, len(module.weight) - 1, 0)), x + module.bias
    for offset, weight in enumerate(module.weight):
        y = y + weight * inputs[:, offset : offset + x.shape[1]]
    return y


def depthwise(module: ShortConvolution, x: Tensor) -> Tensor:
    padded, weight = F.pad(x.mT, (len(module.weight) - 1, 0)), module.weight.mT.unsqueeze(1)
    return x + F.conv1d(padded, weight, module.bias, groups=x.shape[2]).mT


FORMS = (operator, shifted_sum, depthwise)


def forward(form: Callable[..., Tensor], module: ShortConvolution, x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (form(module, x),)


def training(form: Callable[..., Tensor], module: ShortConvolution, x: Tensor) -> tuple[Tensor, ...]:
    y = form(module, x)
    return torch.autograd.grad(y, (x, *module.parameters()), x.detach())


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time per call, of as many calls as last `SPAN` seconds."""
    calls, start = 0, time.process_time()
    while time.process_time() - start < SPAN:
        call()
        calls += 1
    return (time.process_time() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':27}" + "".join(f"{form.__name__:>13}" for form in FORMS))
    for shape in SHAPES:
        module, x = ShortConvolution(shape[2], arguments.width), torch.randn(shape, requires_grad=True)
        for work in (forward, training):
            for y, exact in zip(work(operator, module, x), work(shifted_sum, module, x), strict=True):
                assert (y - exact).norm() < 1e-5 * exact.norm()
            calls = [partial(work, form, module, x) for form in FORMS]
            turns = [[seconds(call) for call in calls] for _ in range(arguments.repeats)]
            medians = [1e3 * statistics.median(times) for times in zip(*turns, strict=True)]
            print(f"{shape!s:16} {work.__name__:10}" + "".join(f"{ms:13.3f}" for ms in medians))


if __name__ == "__main__":
    main()
