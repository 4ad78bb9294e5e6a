"""Count linattn's functions on the stack at the first matrix product of the attention in a public call:

python benchmarks/call_depth.py --calls    # and which"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import linattn
from linattn.compat.performer_pytorch import PerformerLM

PACKAGE = str(Path(linattn.__file__).parent)
OPERATORS = f"{PACKAGE}/ops"
PRODUCTS = {"matmul", "bmm", "baddbmm", "baddbmm_", "mm", "addmm", "einsum", "linear"}


class FirstProduct(TorchFunctionMode):
    """Keeps the stack at the first product inside an operator, the outermost call first."""

    calls: list[str] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.calls is None and function.__name__ in PRODUCTS:
            frames = [frame for frame in stack() if frame.startswith(PACKAGE)]
            if any(frame.startswith(OPERATORS) for frame in frames):
                self.calls = frames[::-1]
        return function(*args, **(kwargs or {}))


def stack() -> Iterator[str]:
    frame = sys._getframe()
    while frame := frame.f_back:
        yield f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}"


def calls_to_the_first_product(call: Callable[[], object]) -> list[str]:
    with torch.no_grad(), FirstProduct() as product:
        call()
    assert product.calls is not None, "no product was found"
    return [name.removeprefix(PACKAGE + "/") for name in product.calls]


def public_calls() -> dict[str, Callable[[], object]]:
    q, k, v = torch.randn(3, 1, 2, 200, 16)
    attention = linattn.named_attention("elu", num_heads=2, head_dim=16, causal=True)
    module = linattn.MultiheadAttention(32, 2, attention)
    performer = PerformerLM(num_tokens=11, max_seq_len=200, dim=32, depth=1, heads=2, dim_head=16, causal=True).eval()
    return {
        "causal_linear_attention": lambda: linattn.causal_linear_attention(q, k, v, feature_map="elu_plus_one"),
        "MultiheadAttention": lambda: module(torch.randn(1, 200, 32)),
        "PerformerLM": lambda: performer(torch.randint(11, (1, 200))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    for name, call in public_calls().items():
        calls = calls_to_the_first_product(call)
        print(f"{name}: {len(calls)}")
        if options.calls:
            print(*(f"    {each}" for each in calls), sep="\n")


if __name__ == "__main__":
    main()
