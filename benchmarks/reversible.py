"""The memory that residual and reversible stacks keep for the backward pass, and the time of both passes, by depth:

python benchmarks/reversible.py --depths 2 8 32"""

import argparse
import time

import torch
from torch import Tensor, nn

import linattn

Stack = linattn.ResidualSequence | linattn.ReversibleSequence


def pairs(depth: int, dim: int) -> list[tuple[linattn.Branch, linattn.Branch]]:
    made = []
    for _ in range(depth):
        inner = linattn.named_attention("local:4+elu:4", num_heads=8, head_dim=dim // 8, causal=True)
        attention = linattn.MultiheadAttention(dim, 8, inner)
        feed_forward = linattn.FeedForward(dim, 4 * dim)
        made.append(tuple(linattn.Branch(module, norm=nn.LayerNorm(dim)) for module in (attention, feed_forward)))
    return made


def build(kind: str, depth: int, dim: int) -> Stack:
    if kind == "reversible":
        return linattn.ReversibleSequence(pairs(depth, dim))
    return linattn.ResidualSequence(branch for pair in pairs(depth, dim) for branch in pair)


def megabytes_kept(stack: Stack, x: Tensor) -> float:
    """Return the megabytes of activations, each storage counted once, without those of the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in stack.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stack(x)
    sizes = (tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)
    return sum(sizes) / 1e6


def seconds(stack: Stack, x: Tensor) -> float:
    start = time.perf_counter()
    stack(x).square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    print("| pairs | residual, MB | reversible, MB | residual, s | reversible, s |\n|---|---|---|---|---|")
    for depth in arguments.depths:
        stacks = [build(kind, depth, arguments.dim) for kind in ("residual", "reversible")]
        x = torch.randn(1, arguments.length, arguments.dim, requires_grad=True)
        kept = [f"{megabytes_kept(stack, x):,.0f}" for stack in stacks]
        times = [f"{min(seconds(stack, x) for _ in range(2)):.2f}" for stack in stacks]
        print(f"| {depth} | " + " | ".join(kept + times) + " |")


if __name__ == "__main__":
    main()
