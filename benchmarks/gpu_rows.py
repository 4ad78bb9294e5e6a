"""The rows that `gpu.py` measures, section by section."""

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from linattn.models import LanguageModel, LanguageModelConfig
from linattn.ops import LinearState, causal_linear_attention, linear_attention
from linattn.ops.softmax.flex import flex_window
from linattn.ops.softmax.local import in_blocks
from linattn.ops.softmax.window import Window
from linattn.ops.triton import tiling

ELU: dict[str, Any] = {"feature_map": "elu_plus_one"}
TRITON: dict[str, Any] = {"backend": "triton"}
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}

Attend = Callable[..., Tensor]


class Prepared(NamedTuple):
    """A call to time, its results, and those that it should have, if another backend can say."""

    call: Callable[[], object]
    results: Callable[[], Sequence[Tensor]]
    exact: Callable[[], Sequence[Tensor]] | None


class Row(NamedTuple):
    """One line of the table: how often the least bytes of this call could be copied is its share. 0 bytes: no share."""

    name: str
    shape: str
    bytes: int
    bound: float
    prepare: Callable[[torch.device], Prepared]


class Size(NamedTuple):
    """Rows are batch · heads."""

    rows: int
    n: int
    d: int
    dtype: torch.dtype = torch.bfloat16

    def tokens(self, device: torch.device) -> list[Tensor]:
        """As a layer makes them: (batch, n, heads, d), heads moved forward."""
        batch, heads = (self.rows // 16, 16) if self.rows % 16 == 0 else (1, self.rows)
        shape = (batch, self.n, heads, self.d)
        return [torch.randn(shape, device=device).to(self.dtype).transpose(1, 2) for _ in range(3)]

    def __str__(self) -> str:
        return f"B·H={self.rows} n={self.n} D={self.d} {str(self.dtype).removeprefix('torch.')}"


def causal(**options: Any) -> Attend:
    return lambda q, k, v, **backend: causal_linear_attention(q, k, v, **ELU | options | backend)[0]


def bidirectional(q: Tensor, k: Tensor, v: Tensor, **backend: Any) -> Tensor:
    return linear_attention(q, k, v, **ELU, **backend)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def row(name: str, attend: Attend, size: Size, *, training: bool = False, ours: bool = True) -> Row:
    """Least bytes: q, k, v and y; with gradients, q, k, v and dy again, and dq, dk and dv. `ours` takes a backend."""

    def results(tensors: Sequence[Tensor], **backend: Any) -> Sequence[Tensor]:
        *inputs, upstream = tensors
        if not training:
            return [attend(*inputs, **backend)]
        inputs = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(attend(*inputs, **backend), inputs, upstream)

    def prepare(device: torch.device) -> Prepared:
        tensors = size.tokens(device)
        tensors.append(torch.randn_like(tensors[0]))

        def mine() -> Sequence[Tensor]:
            return results(tensors, **(TRITON if ours else {}))

        def exact() -> Sequence[Tensor]:
            return results([x.float() for x in tensors], backend="chunked")

        return Prepared(mine, mine, exact if ours else None)

    least = size.rows * size.n * size.d * torch.empty(0, dtype=size.dtype).element_size()
    name = f"{name}{', training' if training else ''}"
    return Row(name, str(size), (11 if training else 4) * least, BOUNDS[size.dtype], prepare)


def sizes(smallest: bool) -> list[Size]:
    return [Size(2, 40, 16)] if smallest else [Size(128, n, d) for d in (64, 128) for n in (8192, 1024)]


def trainings(smallest: bool) -> tuple[bool, ...]:
    """Without and with gradients; the smallest run, which gradients begin with, only with them."""
    return (True,) if smallest else (False, True)


def forward(smallest: bool, *, training: bool = False) -> Iterator[Row]:
    for size in sizes(smallest):
        yield row("linattn, elu + 1", causal(), size, training=training)


def training(smallest: bool) -> Iterator[Row]:
    return forward(smallest, training=True)


def tiles(smallest: bool) -> Iterator[Row]:
    """Other tiles than the rule's, for whoever writes the next rule. What is out of shared memory says so."""
    chosen, tried = tiling.Shape.rule, [(C, w, s) for C in (128, 64) for w in (8, 4) for s in (3, 2)]
    for size in sizes(smallest)[::2]:
        for C, warps, stages in tried[:1] if smallest else tried:
            if smallest:
                C = 32
            rule, name = tiling.Rule(C, max(4096, size.d * size.d), warps, stages, warps), f"C={C} warps={warps}"
            tiling.Shape.rule = lambda _, rule=rule: rule
            for trained in trainings(smallest):
                yield row(f"{name} stages={stages}", causal(), size, training=trained)
                if stages == 3 and C == 64:
                    yield row(f"{name}, with a decay", decaying, size, training=trained)
            tiling.Shape.rule = chosen


def long(smallest: bool) -> Iterator[Row]:
    for trained in trainings(smallest):
        for d in (16,) if smallest else (64, 128):
            yield row("few rows", causal(), Size(1 if smallest else 8, 50 if smallest else 65_536, d), training=trained)


def step_row(batch: int, heads: int, d: int, *, graph: bool) -> Row:
    """One token: the state is read and written."""

    def prepare(device: torch.device) -> Prepared:
        q, k, v = (torch.randn(batch, heads, 1, d, device=device).bfloat16() for _ in range(3))
        state = LinearState(torch.rand(batch, heads, d, d, device=device), torch.rand(batch, heads, d, device=device))

        @torch.no_grad()
        def step(**backend: Any) -> list[Tensor]:
            y, after = causal_linear_attention(q, k, v, state, **ELU, **backend)
            return [y, *after]

        def ours() -> list[Tensor]:
            return step(**TRITON)

        # the first call compiles
        ours()
        return Prepared(captured(ours) if graph else ours, ours, lambda: step(backend="recurrent"))

    size, how = batch * heads * (2 * 4 * (d * d + d) + 4 * 2 * d), "in a graph" if graph else "eager"
    return Row(f"one token, {how}", f"B={batch} H={heads} D={d}", size, BOUNDS[torch.bfloat16], prepare)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda: (graph.replay(), kept)


def step(smallest: bool) -> Iterator[Row]:
    for batch, heads, d in ((1, 2, 8),) if smallest else ((1, 16, 128), (256, 16, 128), (512, 16, 64)):
        for graph in (False, True) if torch.cuda.is_available() else (False,):
            yield step_row(batch, heads, d, graph=graph)


def ablations(smallest: bool) -> Iterator[Row]:
    """The time of each part, in place of a profiler."""
    for size in sizes(smallest)[::2]:
        # features that may be negative have denominators near zero, which no gradient survives
        for trained in trainings(smallest):
            yield row("φ = identity", causal(feature_map="identity", normalize=None), size, training=trained)
            yield row("normalize=None", causal(normalize=None), size, training=trained)
            yield row("with a decay", decaying, size, training=trained)


def decaying(q: Tensor, k: Tensor, v: Tensor, **backend: Any) -> Tensor:
    log_decay = torch.full(q.shape[-2:-1], -0.01, device=q.device)
    return causal_linear_attention(q, k, v, log_decay=log_decay, **ELU, **backend)[0]


def softmax_rows(smallest: bool) -> Iterator[Row]:
    for size in sizes(smallest):
        for trained in trainings(smallest):
            yield row("SDPA", softmax, size, training=trained, ours=False)


def bidirectional_rows(smallest: bool) -> Iterator[Row]:
    for size in sizes(smallest)[::2]:
        for trained in trainings(smallest):
            yield row("to all keys", bidirectional, size, training=trained)


def dtypes(smallest: bool) -> Iterator[Row]:
    tried = ((torch.float16, 128), (torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 256))
    for dtype, d in tried[:2] if smallest else tried:
        for trained in trainings(smallest):
            size = Size(2, 40, 16, dtype) if smallest else Size(128, 2048, d, dtype)
            yield row("linattn, elu + 1", causal(), size, training=trained)


def local(smallest: bool) -> Iterator[Row]:
    """The window through FlexAttention, as it is on a GPU, and in blocks, as it is elsewhere."""
    window, size = Window(128, causal=True), Size(2, 40, 16) if smallest else Size(128, 4096, 64)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_window(q, k, v, window=window)

    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return in_blocks(q, k, v, window, None)

    # FlexAttention has no gradients on a CPU
    for trained in trainings(smallest) if torch.cuda.is_available() else (False,):
        for name, run in (("flex", flex), ("in blocks", blocks)):
            yield row(f"window of 128, {name}", run, size, training=trained, ours=False)


def models(smallest: bool) -> Iterator[Row]:
    """Language models of 6 layers of 768 channels, in bfloat16 products of float32 weights, as they are trained."""
    names = "softmax", "elu", "local", "local+elu", "retention", "ssd", "gla", "gated_delta", "kda"
    for name in ("elu", "kda") if smallest else names:
        for b, n in ((2, 20),) if smallest else ((8, 4096), (1, 32_768)):
            for trained in (True, False):
                yield model_row(name, b, n, training=trained, smallest=smallest)
        yield model_row(name, 8, 1, training=False, smallest=smallest)


def model_row(name: str, b: int, n: int, *, training: bool, smallest: bool) -> Row:
    """A training step without its optimizer, or the logits and the state of a prompt, or of one token after it."""
    dim, depth, heads = (16, 1, 2) if smallest else (768, 6, 12)

    def prepare(device: torch.device) -> Prepared:
        torch.manual_seed(0)
        config = LanguageModelConfig(vocab_size=256, dim=dim, depth=depth, num_heads=heads, attention=name)
        on_cpu = LanguageModel(config)
        model, tokens = copy.deepcopy(on_cpu).to(device), torch.randint(256, (b, n), device=device)
        few = torch.randint(256, (1, 20 if smallest else 300))

        @torch.autocast(device.type, torch.bfloat16)
        def learn() -> None:
            cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
            model.zero_grad()

        @torch.no_grad()
        @torch.autocast(device.type, torch.bfloat16)
        def extend(x: Tensor, state: Any = None) -> Any:
            return model.extend(x, state)

        def results() -> list[Tensor]:
            return [extend(few.to(device))[0].float().cpu()]

        def exact() -> list[Tensor]:
            return [on_cpu.extend(few)[0].detach()]

        past = extend(few.to(device).expand(b, -1))[1] if n == 1 else None
        return Prepared(learn if training else lambda: extend(tokens, past), results, exact)

    what = "training" if training else "a token" if n == 1 else "a prompt"
    return Row(f"{name}, {what}", f"B={b} n={n} dim={dim} depth={depth}", 0, 5e-2, prepare)


def contenders(smallest: bool) -> Iterator[Row]:
    """flash-linear-attention, with features given; it tunes itself at the first call of each shape."""
    for name in ("fused_chunk_linear_attn", "chunk_linear_attn"):
        for normalized in (True, False):
            for size in sizes(smallest)[::2]:
                for trained in trainings(smallest):
                    attend = flash_linear_attention(name, normalized)
                    label = f"fla {name}{', normalised' if normalized else ''}"
                    yield row(label, attend, size, training=trained, ours=False)


def flash_linear_attention(name: str, normalize: bool) -> Attend:
    """A function of the package `fla`, which has tokens before heads."""
    function = getattr(importlib.import_module("fla.ops.linear_attn"), name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # without a scale some versions fail when they normalise
        return function(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=normalize)[0].transpose(1, 2)

    return attend


SECTIONS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "forward": forward, "training": training, "tiles": tiles, "long": long, "step": step, "ablations": ablations,
    "softmax": softmax_rows, "bidirectional": bidirectional_rows, "dtypes": dtypes, "local": local,
    "models": models, "contenders": contenders,
}  # fmt: skip
