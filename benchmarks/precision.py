"""The errors of gradients against float64 on the same rounded inputs, and the memory kept for the backward pass.

    PYTHONPATH=. python benchmarks/precision.py [--tokens 256 2048 16384 65536] [--dim 16] [--means 0 1 10]

Relative errors of the gradients of q, k and v (norm of the difference over norm), elu + 1 and its denominator; softmax
attention (SDPA) stands beside, up to 4,096 tokens, against its own float64."""

import argparse

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from linattn.ops import causal_linear_attention, linear_attention
from tests.recurrence import recurrence, relative, rounded

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, feature_map="elu_plus_one")[0]


def over_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, feature_map="elu_plus_one")


def causal_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    zero = q.new_zeros(len(q), q.shape[-1], v.shape[-1])
    return recurrence(q, k, v, zero, zero[..., 0], None, "output")[0]


def definition_over_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1))


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


KINDS = {
    "causal": (causal, causal_definition),
    "all keys": (over_all, definition_over_all),
    "softmax, causal": (softmax, softmax),
}


def kept_bytes(n: int, dim: int) -> tuple[int, int]:
    """Bytes that the causal operator keeps for its backward, and those of its inputs."""
    inputs, kept = [torch.randn(1, 8, n, dim, requires_grad=True) for _ in range(3)], {}

    def count(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        causal(*inputs)
    return sum(kept.values()), sum(x.nbytes for x in inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048, 16384, 65536])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--means", type=float, nargs="+", default=[0.0, 1.0, 10.0])
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'tokens':>8} {'mean of v':>9} {'attention':<16} {'dtype':<9} {'q':>8} {'k':>8} {'v':>8}")
    for n in options.tokens:
        for mean in options.means:
            q, k, v, upstream = (rounded(1, n, options.dim, mean=m) for m in (0.0, 0.0, mean, 0.0))
            exact = [x.requires_grad_() for x in (q, k, v)]
            for name, (attend, define) in KINDS.items():
                if name.startswith("softmax") and n > 4096:
                    continue
                expected = torch.autograd.grad(define(*exact), exact, upstream)
                for dtype in DTYPES:
                    leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
                    ours = torch.autograd.grad(attend(*leaves), leaves, upstream.to(dtype))
                    errors = " ".join(f"{relative(a, b):>8.2%}" for a, b in zip(ours, expected, strict=True))
                    kind = str(dtype).removeprefix("torch.")
                    print(f"{n:>8,} {mean:>9g} {name:<16} {kind:<9} {errors}", flush=True)
    kept, inputs = kept_bytes(16384, 64)
    print(f"\nkept for the backward of 16,384 tokens, 8 heads of 64, float32: {kept / 2**20:.1f} MiB,", end=" ")
    print(f"of which q, k and v are {inputs / 2**20:.1f}")


if __name__ == "__main__":
    main()
