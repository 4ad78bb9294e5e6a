"""The figures of docs/compat.md: how far the packages that we replace are from their own formulas, and from us.

python -m benchmarks.compat_figures        # needs the extra "peers"; a minute on one core"""

import argparse
import resource
import time
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linattn.compat import weights
from linattn.compat.performer_pytorch import FastAttention, PerformerLM

with warnings.catch_warnings():
    # distutils, at the import of performer-pytorch
    warnings.simplefilter("ignore", DeprecationWarning)
    from linear_attention_transformer import linear_attention_transformer as lat
    from performer_pytorch import performer_pytorch as performer

# it says so for each causal attention that no CUDA package was found
performer.print = lambda *_: None
SEEDS = range(5)
MODEL: dict[str, Any] = {"num_tokens": 256, "max_seq_len": 256, "dim": 128, "depth": 2, "heads": 4, "causal": True}


def span(name: str, values: list[float]) -> None:
    print(f"{name}: {min(values):.3g} … {max(values):.3g}")


def without_epsilon(model: nn.Module) -> nn.Module:
    """Leave the 10⁻⁶ out of the causal denominators."""
    for part in model.modules():
        if isinstance(part, performer.FastAttention):
            part.causal_linear_fn = partial(performer.causal_linear_attention_noncuda, eps=0)
    return model


@torch.no_grad()
def their_model(seed: int, factor: float = 1.0, **options: Any) -> nn.Module:
    """A fresh one, with the weights of queries and keys multiplied by `factor`."""
    torch.manual_seed(seed)
    model = performer.PerformerLM(**MODEL | options).double().eval()
    for name, weight in model.named_parameters():
        if "to_q" in name or "to_k" in name:
            weight.mul_(factor)
    return model


@torch.no_grad()
def look_ahead(factor: float, **options: Any) -> None:
    """Compare logits with ours: as the package is, and without the 10⁻⁶, where what remains is the look ahead."""
    shipped, differences, deviations = [], [], []
    for seed in SEEDS:
        theirs = their_model(seed, factor, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            ours = weights.load(PerformerLM, MODEL | options, theirs.state_dict())
        x = torch.randint(256, (1, 256))
        exact = ours(x)
        shipped.append((theirs(x) - exact).abs().max().item())
        differences.append((without_epsilon(theirs)(x) - exact).abs().max().item())
        deviations.append(exact.std().item())
    span(f"causal FAVOR+, fresh, q and k × {factor:g}, {options}: largest difference of logits", shipped)
    span("    without the 10⁻⁶", differences)
    span("    standard deviation of logits", deviations)


@torch.no_grad()
def epsilon(name: str, **options: Any) -> None:
    """Compare their logits with and without the 10⁻⁶ in the causal denominator."""
    first, rest = [], []
    for seed in SEEDS:
        model = their_model(seed, **options)
        x = torch.randint(256, (1, 256))
        with_it = model(x)
        difference = (without_epsilon(model)(x) - with_it).abs().amax(-1)[0]
        first.append(difference[0].item())
        rest.append(difference[1:].max().item())
    span(f"10⁻⁶ in the causal denominator, {name}: first token", first)
    span("    all others", rest)


@torch.no_grad()
def tables() -> None:
    """Compare float32 models that have rotary positions, both ways, so that nothing else differs."""
    for n in (512, 4096):
        config = MODEL | {"causal": False, "max_seq_len": n}
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            theirs = performer.PerformerLM(**config).eval()
            x = torch.randint(256, (1, n))
            found.append((weights.load(PerformerLM, config, theirs.state_dict())(x) - theirs(x)).abs().max().item())
        span(f"tables of angles in float32, {n} tokens: largest difference of logits", found)
    for d in (64, 512):
        table = performer.FixedPositionalEmbedding(d, 8193).emb[8192].double()
        angles = 8192 * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
        exact = torch.cat([angles.sin(), angles.cos()])
        print(f"    the table of {d} channels itself at position 8,192: {(table - exact).abs().max():.2g}")


@torch.no_grad()
def attentions() -> None:
    """Faults of single attentions."""
    shares, moved, below = [], [], []
    for seed in range(30):
        torch.manual_seed(seed)
        options = {"heads": 4, "dim_head": 16, "generalized_attention": True, "attn_out_bias": False}
        attention = performer.SelfAttention(64, **options).eval()
        x, mask = torch.randn(1, 256, 64), torch.arange(256)[None] < 64
        shares.append((attention(x, mask=mask)[:, :64].norm() / attention(x[:, :64]).norm()).item())
        fast = performer.FastAttention(64, causal=True).double()
        q, k, v = torch.randn(3, 1, 1, 64, 64).double()
        before = fast(q, k, v)[:, :, :-1]
        for factor in (2, 3, 4, 5, 6):
            louder = k.clone()
            louder[:, :, -1] *= factor
            moved.append(((fast(q, louder, v)[:, :, :-1] - before).norm() / before.norm()).item())
        features = performer.softmax_kernel(
            torch.randn(1, 8, 256, 64), projection_matrix=fast.projection_matrix.float(), is_query=False, eps=0
        )
        below.append(100 * (features * len(fast.projection_matrix) ** 0.5 < 1e-4).double().mean().item())
    span("performer-pytorch, 64 of 256 tokens present: share of the output's norm", shares)
    span("performer-pytorch, a late key × 2 … 6: change of earlier outputs", moved)
    span("FAVOR+ of 64 channels of unit variance: % of features below the floor", below)


@torch.no_grad()
def linear_heads() -> None:
    """Faults of the linear heads of linear-attention-transformer."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 256, 64).double()
    causal = partial(lat.causal_linear_attn, bucket_size=1)
    y = causal(q, k, v)
    faded = ((causal(q, k - 6, v) - y).norm() / y.norm()).item()
    print(f"linear-attention-transformer, causal, keys shifted by −6: outputs change by {faded:.0%}")
    for dtype, stds in ((torch.float32, (16, 32)), (torch.float16, (2, 4))):
        finite = [bool(causal(q.to(dtype), (k * std).to(dtype), v.to(dtype)).isfinite().all()) for std in stds]
        print(f"    {dtype}: finite with keys of deviation {stds}: {finite}")
    angles = torch.arange(356)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    table = torch.cat([angles.sin(), angles.cos()], -1).double()

    def turned(start: int) -> Tensor:
        return lat.linear_attn(*lat.apply_rotory_pos_emb(q, k, table[None, start : start + 256]), v)

    print(f"    rotary linear heads, begun 100 later: {(turned(100) - turned(0)).norm() / turned(0).norm():.0%}")


@torch.no_grad()
def half_precision() -> None:
    lengths = (64, 512, 1024, 2048)
    for name, options in {"causal FAVOR+": {"causal": True}, "ReLU": {"generalized_attention": True}}.items():
        finite = []
        for n in lengths:
            torch.manual_seed(0)
            attention, x = performer.FastAttention(64, **options).half(), torch.randn(3, 1, 8, n, 64).half()
            finite.append(bool(attention(*x).isfinite().all()))
        print(f"performer-pytorch in float16, {name}: finite at {lengths}: {finite}")


def training() -> None:
    """Time training steps of causal attention in turns: 8 heads of 64 channels, 266 features, 2,048 tokens."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 8, 2048, 64, requires_grad=True) for _ in range(3)]
    attentions = {"ours": FastAttention(64, causal=True), "theirs": performer.FastAttention(64, causal=True)}
    seconds: dict[str, list[float]] = {name: [] for name in attentions}
    for _ in range(3):
        for name, attention in attentions.items():
            start = time.process_time()
            attention(*inputs).sum().backward()
            seconds[name].append(time.process_time() - start)
    for name, found in seconds.items():
        span(f"FastAttention, causal, training on 2,048 tokens, {name}: seconds of processor time", found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"    peak memory of the process: {peak:.1f} GiB")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    for options in ({}, {"dim_head": 16}):
        look_ahead(1, **options)
        look_ahead(2, **options)
    epsilon("FAVOR+")
    epsilon("ReLU", generalized_attention=True)
    epsilon("10 ReLU features, q and k × 2", factor=2, generalized_attention=True, nb_features=10)
    tables()
    attentions()
    linear_heads()
    half_precision()
    training()


if __name__ == "__main__":
    main()
