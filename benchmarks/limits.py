"""The time of the CPU forms beside that of the products they need, and the cost of a busy neighbour, in turns.

    python benchmarks/limits.py [--threads 1] [--repeats 5] [--only local,model,…]

tokens: a token's cost, at 1,048,576 tokens and at 4,096. neighbour: two threads, while another process holds a core.
linformer, local: attention, and its matrix products alone. model: a generated token of 12 layers, 512 wide, and the
products of its weights with one vector. step: a token of the operator alone. short: gradients of small shapes,
beside torch's fused softmax attention and the masked matrix of all similarities. options: what each costs. long:
gradients and prompts of the default language model, and of the same with softmax."""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from linear_operator import ATTENTIONS, CHANNELS, ELU, HEADS, forward, inputs, training
from linear_operator import linear as operator
from linear_operator import step as one_step
from torch import Tensor
from torch.nn.functional import elu as elu_map
from torch.nn.functional import linear, scaled_dot_product_attention

from linattn.attention import LearnedProjection, LinformerAttention
from linattn.cli.argument_types import names_from
from linattn.cli.bench.measure import Call, interleaved_times
from linattn.generation import stream
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.models.loss import next_token_loss
from linattn.ops.softmax.local import local_attention
from linattn.ops.softmax.window import Window

Row = tuple[str, float, str]
elu = ATTENTIONS[ELU]


def medians(calls: Mapping[str, Call], repeats: int, warm: float = 0.5) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in interleaved_times(calls, repeats, warm=warm).items()}


def compared(what: str, ours: Call, limit: Call, repeats: int) -> Row:
    """The time of ours, and its ratio to the limit's."""
    found = medians({"ours": ours, "limit": limit}, repeats)
    return what, found["ours"], f"{found['ours'] / found['limit']:.2f} × {found['limit'] * 1e3:.3f} ms"


def tokens(repeats: int) -> Iterator[Row]:
    long, short = 2**20, 2**12
    found = medians({"long": forward(elu, long), "short": forward(elu, short)}, repeats)
    ratio = found["long"] / long / (found["short"] / short)
    yield f"forward of {long:,} tokens", found["long"], f"a token takes {ratio:.2f} × of what it does in {short:,}"


def hold_a_core() -> None:
    while True:
        pass


def neighbour(repeats: int) -> Iterator[Row]:
    torch.set_num_threads(2)
    for name, make in (("forward", forward), ("forward and backward", training)):
        call = make(elu, 4096)
        alone = medians({name: call}, repeats)[name]
        process = multiprocessing.get_context("spawn").Process(target=hold_a_core, daemon=True)
        process.start()
        time.sleep(3)
        beside = medians({name: call}, repeats)[name]
        process.kill()
        process.join()
        yield f"{name} of 4,096, two threads, a core held", beside, f"{beside / alone:.2f} × {alone * 1e3:.1f} ms alone"


def linformer(repeats: int, n: int = 4096, r: int = 128) -> Iterator[Row]:
    inner, (q, k, v) = LinformerAttention(LearnedProjection(n, r)).eval(), inputs(n)
    E, A, kr = torch.randn(r, n), torch.randn(1, HEADS, n, r), torch.randn(1, HEADS, CHANNELS, r)

    @torch.no_grad()
    def products() -> object:
        return E @ k, E @ v, q @ kr, A @ kr.mT

    with torch.no_grad():
        yield compared(f"Linformer, {n:,} → {r}", lambda: inner(q, k, v), products, repeats)


def local(repeats: int) -> Iterator[Row]:
    for size in (32, 64, 128, 256, 512):
        yield one_window(Window(size, causal=True), repeats)


def one_window(window: Window, repeats: int, n: int = 4096) -> Row:
    q, k, v = inputs(n)
    rows, seen = window.block, window.block + window.reach
    shapes = (rows, CHANNELS), (CHANNELS, seen), (rows, seen)
    a, b, c = (torch.randn(HEADS * n // rows, *shape) for shape in shapes)
    ours, products = partial(local_attention, q, k, v, window=window), lambda: (a @ b, c @ b.mT)
    return compared(f"local, window of {window.size}, {n:,} tokens", ours, products, repeats)


def model(repeats: int) -> Iterator[Row]:
    for attention in ("elu", "local+elu"):
        yield one_model(attention, repeats)


@torch.inference_mode()
def one_model(attention: str, repeats: int) -> Row:
    config = LanguageModelConfig(vocab_size=257, dim=512, depth=12, num_heads=8, attention=attention)
    model, token = LanguageModel(config).eval(), torch.zeros(1, 1, dtype=torch.long)
    _, state = model.extend(torch.zeros(1, 300, dtype=torch.long))
    matrices = [x for x in model.parameters() if x.ndim == 2]
    vectors = [torch.randn(1, x.shape[1]) for x in matrices]
    ours, products = partial(model.extend, token, state), lambda: list(map(linear, vectors, matrices))
    return compared(f"a token of 12 layers of 512, {attention}", ours, products, repeats)


def step(repeats: int) -> Iterator[Row]:
    call = one_step()
    yield "a token of the operator", medians({"step": call}, repeats)["step"], ""
    yield "the same in inference mode", medians({"step": torch.inference_mode()(call)}, repeats)["step"], ""


SHORT = ((12, 4, 64, 32), (64, 4, 64, 16), (64, 1, 128, 64), (1, 8, 64, 64), (1, 8, 256, 64), (1, 8, 512, 64))


def matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    A = ((elu_map(q) + 1) @ (elu_map(k) + 1).mT).tril()
    return A @ v / A.sum(-1, keepdim=True)


def short(repeats: int) -> Iterator[Row]:
    forms = {"ours": elu, "softmax": partial(scaled_dot_product_attention, is_causal=True), "matrix": matrix}
    for shape in SHORT:
        leaves, upstream = [torch.randn(shape, requires_grad=True) for _ in range(3)], torch.randn(shape)
        train = {name: partial(gradients, form, leaves, upstream) for name, form in forms.items()}
        found = medians(train, repeats)
        note = f"softmax {found['softmax'] * 1e3:.2f} ms, the matrix {found['matrix'] * 1e3:.2f} ms"
        yield f"batch, heads, n, d = {shape}", found["ours"], note


def gradients(form: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor) -> object:
    return torch.autograd.grad(form(*leaves), leaves, upstream)


def options(repeats: int, n: int = 4096) -> Iterator[Row]:
    """Grouped: four query heads share a key head, so that there are a quarter as many keys, values and states."""
    choices: dict[str, dict[str, Any]] = {
        "plain": {},
        "a decay for each token": {"log_decay": -torch.rand(1, HEADS, n) / 10},
        "a key mask": {"key_mask": torch.rand(1, 1, n) < 0.7},
        "each feature over its own sum": {"normalize": "keys"},
        "no denominator": {"normalize": None},
    }
    forms = {name: operator("elu_plus_one", **choice) for name, choice in choices.items()}
    leaves, upstream = [x.requires_grad_() for x in inputs(n)], torch.randn(1, HEADS, n, CHANNELS)
    calls = {name: partial(gradients, form, leaves, upstream) for name, form in forms.items()}
    grouped = (x.detach().unflatten(1, (-1, 4)) for x in leaves)
    few = [x[:, :, :heads].clone().requires_grad_() for x, heads in zip(grouped, (4, 1, 1), strict=True)]
    calls["grouped queries"] = partial(gradients, forms["plain"], few, upstream.unflatten(1, (-1, 4)))
    forwards = {name: torch.no_grad()(partial(form, *leaves)) for name, form in forms.items()}
    forwards["grouped queries"] = torch.no_grad()(partial(forms["plain"], *few))
    for work, kinds in (("forward", forwards), ("training", calls)):
        found = medians(kinds, repeats)
        for name, seconds in found.items():
            yield f"{work}, {name}", seconds, f"{seconds / found['plain']:.2f} × plain"


def long(repeats: int) -> Iterator[Row]:
    """Once each, after a short one: softmax takes minutes."""
    for n in (16_384, 65_536):
        for attention in ("elu", "local+elu", "softmax"):
            model = LanguageModel(LanguageModelConfig(vocab_size=257, attention=attention))
            if (n, attention) != (65_536, "softmax"):
                yield once(f"a step of training on {n:,} tokens, {attention}", partial(train, model), n)
            yield once(f"a prompt of {n:,} tokens, {attention}", partial(read, model.eval()), n)


def once(what: str, call: Callable[[Tensor], object], n: int) -> Row:
    tokens = torch.randint(257, (1, n))
    call(tokens[:, :256])
    started = time.perf_counter()
    call(tokens)
    seconds = time.perf_counter() - started
    return what, seconds, f"{n / seconds:,.0f} tokens per second"


def train(model: LanguageModel, tokens: Tensor) -> None:
    next_token_loss(model(tokens[:, :-1]), tokens).backward()


def read(model: LanguageModel, tokens: Tensor) -> object:
    return next(stream(model, tokens, max_new_tokens=1))


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "step": step,
    "short": short,
    "options": options,
    "linformer": linformer,
    "local": local,
    "model": model,
    "long": long,
    "tokens": tokens,
    "neighbour": neighbour,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only", type=names_from(tuple(PARTS)), default=tuple(PARTS), help="parts, with commas between"
    )
    options = parser.parse_args()
    for part in options.only:
        torch.set_num_threads(options.threads)
        for what, seconds, note in PARTS[part](options.repeats):
            print(f"{what:45} {seconds * 1e3:10.3f} ms   {note}", flush=True)


if __name__ == "__main__":
    main()
