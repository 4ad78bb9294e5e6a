"""The effect of the epsilon of the norm of heads in half precision, at initial weights, for each gated method.

    PYTHONPATH=. python benchmarks/head_norm.py [--eps 0 1e-6 1e-5 1e-4] [--seeds 4]

Per epsilon, the worst of all seeds: the relative error of the logits in bfloat16 against float32 with the same weights,
and the largest loss scale (a power of 4) under which all gradients in float16 are finite. Columns are the layers of
tests/models/test_half_precision.py at width 64 and depth 2, and 256 and 4, for 4 × 256 tokens."""

import argparse

import torch
from torch.nn.functional import cross_entropy

from linattn import LanguageModel
from linattn.attention.named import ATTENTIONS
from tests.models.test_half_precision import LAYERS, is_gated, model


def logits_error(rounded: LanguageModel, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        logits = rounded.bfloat16()(tokens).float()
        expected = rounded.float()(tokens)
    return float((logits - expected).norm() / expected.norm())


def largest_scale(trained: LanguageModel, tokens: torch.Tensor) -> int:
    """Return the exponent of the scale."""
    for exponent in range(24, 0, -2):
        trained.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = trained(tokens)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss * 2.0**exponent).backward()
        if all(weight.grad.isfinite().all() for weight in trained.parameters() if weight.grad is not None):
            return exponent
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, nargs="+", default=[0.0, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    for name in filter(is_gated, ATTENTIONS):
        for eps in options.eps:
            print(f"{name:<12} {eps:<6g}", end="")
            for layer in LAYERS:
                for dim, depth in ((64, 2), (256, 4)):
                    errors, scales = [], []
                    for seed in range(options.seeds):
                        torch.manual_seed(seed)
                        tokens = torch.randint(257, (4, 256))
                        scales.append(largest_scale(model(name, layer, dim, depth, eps), tokens) if dim == 64 else 0)
                        errors.append(logits_error(model(name, layer, dim, depth, eps), tokens))
                    scale = f", 2^{min(scales)}" if dim == 64 else ""
                    print(f"   {layer}, {dim}: {max(errors):.2%}{scale}", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
