"""Gates without the delta rule on this machine's CPU: Mamba-2's scan beside transformers' in plain torch, and a decay
per channel (GLA) beside one per head and beside a loop over tokens.

    python benchmarks/gated_linear.py [--threads 1] [--repeats 5] [--only ssd,gla]

Both sides of a row compute in float32 from the same tensors and take turns. Times are medians of processor time; a
machine that is slow for a while is then slow for both, so read their ratio. `apart` is the relative difference of
outputs, or of the worst gradient."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from second_generation import HEADS, difference, with_gradients, without_gradients
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from linattn.cli.argument_types import names_from
from linattn.ops import causal_linear_attention

Call = Callable[[], tuple[Tensor, ...]]

# channels of a value and of the state, tokens, and tokens per chunk of transformers' configuration
SSD, CHUNK = ((64, 128, 2048), (64, 128, 8192)), 256
GLA = ((64, 512), (64, 2048))


def ssd_inputs(p: int, state: int, n: int) -> list[Tensor]:
    """Inputs, steps, decays, and the keys B and queries C that all heads share, in transformers' layout."""
    x, dt, A = torch.randn(1, n, HEADS, p), 0.1 * torch.rand(1, n, HEADS), -1 - 15 * torch.rand(HEADS)
    return [t.requires_grad_() for t in (x, dt, A, *(torch.randn(1, n, 1, state) for _ in range(2)))]


def stock_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    return mamba2_chunk_scan(x, dt, A, B, C, chunk_size=CHUNK)


def our_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """A step scales values and decays: S = exp(A Δ) S + Δ B xᵀ, y = C S."""
    q, k, v = (t.transpose(1, 2) for t in (C, B, x * dt.unsqueeze(-1)))
    log_decay = (A * dt).transpose(1, 2)
    return causal_linear_attention(q, k, v, log_decay=log_decay, normalize=None)[0].transpose(1, 2)


def gla_inputs(d: int, n: int) -> list[Tensor]:
    found = [*(torch.randn(1, HEADS, n, d) for _ in range(3)), -0.1 * torch.rand(1, HEADS, n, d)]
    return [t.requires_grad_() for t in found]


def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, log_decay=log_decay, normalize=None)[0]


def per_head(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return gla(q, k, v, log_decay[..., 0])


def loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Add a token at a time to the state, as models without a chunked form do."""
    S, ys = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1]), []
    for q_t, k_t, v_t, alpha in zip(*(t.split(1, -2) for t in (q, k, v, log_decay.exp())), strict=True):
        S = alpha.mT * S + k_t.mT * v_t
        ys.append(q_t @ S)
    return torch.cat(ys, -2)


def medians(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            # the first turn warms up
            times[name] += [time.process_time() - start] if turn else []
    return {name: statistics.median(values) for name, values in times.items()}


def measure(what: str, forms: Mapping[str, Callable[..., Tensor]], given: list[Tensor], n: int, repeats: int) -> None:
    """Print a row for the forward pass and one for training; the first form is ours, the last computes the same."""
    ours, *others = forms
    with torch.no_grad():
        upstream = torch.randn_like(forms[ours](*given))
    for work in ("forward", "training"):
        calls = {
            name: without_gradients(form, given) if work == "forward" else with_gradients(form, given, upstream)
            for name, form in forms.items()
        }
        apart = max(map(difference, calls[ours](), calls[others[-1]]()))
        each = {name: x / n / HEADS * 1e9 for name, x in medians(calls, repeats).items()}
        row = "  ".join(f"{name} {x:7,.0f}" for name, x in each.items())
        ratios = "  ".join(f"{name} / {ours} {each[name] / each[ours]:5.2f}" for name in others)
        print(f"{what}  n {n:5,}  {work:8}  {row} ns per token and head  {ratios}  apart {apart:.0e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", type=names_from(("ssd", "gla")), default=("ssd", "gla"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "ssd" in options.only:
        for p, state, n in SSD:
            forms = {"ours": our_ssd, "stock": stock_ssd}
            measure(f"ssd  P {p}  N {state}", forms, ssd_inputs(p, state, n), n, options.repeats)
    if "gla" in options.only:
        for d, n in GLA:
            forms = {"per channel": gla, "per head": per_head, "loop": loop}
            measure(f"gla  d {d}", forms, gla_inputs(d, n), n, options.repeats)


if __name__ == "__main__":
    main()
