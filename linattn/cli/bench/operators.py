"""Attentions on queries, keys and values: forward, with gradients, and one token at a time."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from linattn.attention import InnerAttention, LinearAttention, SoftmaxAttention, named_attention
from linattn.cli.bench.cells import Call, Cell, Setup, Work
from linattn.cli.bench.past import past_of
from linattn.cli.bench.peers import PEERS, Shape

CHUNK = 64
"""The length of a chunk that the operator's FLOP are counted with."""


def forward(setup: Setup, cell: Cell) -> Work:
    q, k, v, _ = _shared(_shape(setup, cell.n), cell.torch_dtype, setup.device)
    attention = _attention(setup, cell)
    return Work(_ready(lambda: attention(q, k, v)), flop=_flop(attention, setup, cell, training=False))


def training(setup: Setup, cell: Cell) -> Work:
    q, k, v, upstream = _shared(_shape(setup, cell.n), cell.torch_dtype, setup.device)
    attention = _attention(setup, cell)
    weights = list(attention.parameters()) if isinstance(attention, nn.Module) else []
    wanted = [x.requires_grad_() for x in (q, k, v)] + weights

    def call() -> object:
        # Linformer's package has its queries for keys and values, so no gradients for ours
        return torch.autograd.grad(attention(q, k, v), wanted, upstream, allow_unused=True)

    return Work(_ready(call), grad=True, flop=_flop(attention, setup, cell, training=True))


def decoding(setup: Setup, cell: Cell) -> Work:
    attention = _attention(setup, cell)
    if not isinstance(attention, InnerAttention):
        raise ValueError(f"{cell.method} has no form for one token at a time")
    q, k, v, _ = _made(_shape(setup, 1), cell.torch_dtype, setup.device)

    def extend(n: int, state: object) -> object:
        q, k, v, _ = _made(_shape(setup, n), cell.torch_dtype, setup.device)
        return attention.extend(q, k, v, state)[1]

    def begin() -> Call:
        state = past_of(extend, cell.n, setup.window)
        return lambda: attention.extend(q, k, v, state)

    return Work(begin)


def _ready(call: Call) -> Callable[[], Call]:
    return lambda: call


Shape4 = tuple[int, int, int, int]


def _shape(setup: Setup, n: int) -> Shape4:
    return setup.batch, setup.heads, n, setup.head_dim


def _made(shape: Shape4, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Queries, keys, values, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).to(device) for _ in range(4)]


# contenders that take turns hold the same tensors: a dozen of them would otherwise need a dozen times the memory
_shared = lru_cache(maxsize=1)(_made)


def _attention(setup: Setup, cell: Cell) -> Callable[..., Tensor]:
    torch.manual_seed(0)
    if cell.method in PEERS:
        shape = (cell.n, setup.heads, setup.head_dim, setup.window, setup.causal, cell.torch_dtype, setup.device)
        return PEERS[cell.method].build(Shape(*shape))
    inner = named_attention(
        cell.method,
        num_heads=setup.heads,
        head_dim=setup.head_dim,
        causal=setup.causal,
        window=setup.window,
        max_length=cell.n,
    )
    return inner.to(device=setup.device, dtype=cell.torch_dtype).eval()


def _flop(attention: object, setup: Setup, cell: Cell, *, training: bool) -> float | None:
    """Of the products that the method cannot do without. Softmax: qkᵀ and times v, 7 such with the gradient."""
    d, tokens = setup.head_dim, setup.batch * setup.heads * cell.n
    if isinstance(attention, SoftmaxAttention):
        return tokens * 4 * cell.n * d * (0.5 if setup.causal else 1) * (3.5 if training else 1)
    if not isinstance(attention, LinearAttention):
        return None
    sample = torch.zeros(1, setup.heads, 1, d, dtype=cell.torch_dtype, device=setup.device)
    with torch.no_grad():
        features = attention.feature_map.scaled_query(sample)[0].shape[-1]
    return operator_flop(tokens, features, d, causal=setup.causal, training=training)


def operator_flop(tokens: int, features: int, channels: int, *, causal: bool, training: bool) -> float:
    """Causal, in chunks: qkᵀ, times v, qS and kᵀv, and 13 such with the gradient. Over all keys: kᵀv and qS, and 6."""
    over_all = 4 * features * channels
    if causal:
        return tokens * (2 * CHUNK * (features + channels) + over_all) * (13 / 4 if training else 1)
    return tokens * over_all * (3 if training else 1)
