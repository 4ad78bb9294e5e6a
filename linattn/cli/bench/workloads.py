"""The calls to measure: attentions on queries, keys and values, and complete language models."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.attention import InnerAttention, LinearAttention, SoftmaxAttention, map_state, named_attention
from linattn.attention.base import KeysAndValues
from linattn.cli.bench import DECODING, FORWARD, MODEL_DECODING, MODEL_PREFILL, MODEL_TRAINING, SOFTMAX, TRAINING
from linattn.cli.bench.peers import PEERS, build_peer
from linattn.cli.bench.record import Case, Setup
from linattn.feature_maps import FeatureMap
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.models.generation import stream
from linattn.models.loss import next_token_loss
from linattn.nn.gates import token_gates

# side of the blocks of matrix products, which is also the chunk length with which the operator's FLOP are counted
BLOCK = 64
Call = Callable[[], object]
VOCABULARY = 257
MODEL_METHODS = (SOFTMAX, "local+elu", "elu")
# generation is measured here whatever the lengths are
POSITIONS = (1_000, 100_000)


class Workload(NamedTuple):
    """A call with its inputs made, the FLOP of its matrix products, and the state it starts from."""

    call: Call
    flop: float = 0.0
    """0 if they are not known."""
    state: object = None


def prepare(setup: Setup, case: Case) -> Workload:
    torch.manual_seed(0)
    return PREPARE[case.workload](setup, case)


def _attending(setup: Setup, case: Case) -> Workload:
    q, k, v, upstream = _shared(setup, case.n, case.torch_dtype)
    attention = _attention(setup, case)
    flop, gates = _flop(attention, setup, case), _gates(attention, setup, case.n, case.torch_dtype)
    if case.workload == FORWARD:
        return Workload(torch.no_grad()(lambda: attention(q, k, v, **gates)), flop)
    inputs = [q, k, v]
    map_state(inputs.append, tuple(gates.values()))
    weights = list(attention.parameters()) if isinstance(attention, nn.Module) else []
    wanted = [x.requires_grad_() for x in inputs] + weights
    # Linformer's package takes its queries for keys and values, so ours get no gradients
    return Workload(lambda: torch.autograd.grad(attention(q, k, v, **gates), wanted, upstream, allow_unused=True), flop)


@torch.no_grad()
def _decoding(setup: Setup, case: Case) -> Workload:
    attention = _attention(setup, case)
    if not isinstance(attention, InnerAttention):
        raise ValueError(f"{case.method} has no form for one token at a time")
    q, k, v, _ = _tensors(setup, 1, case.torch_dtype)

    def read(n: int) -> Any:
        past, gates = _tensors(setup, n, case.torch_dtype)[:3], _gates(attention, setup, n, case.torch_dtype)
        return attention.extend(*past, **gates)[1]

    state, gates = state_at(read, case.n, setup.window), _gates(attention, setup, 1, case.torch_dtype)
    return Workload(torch.no_grad()(lambda: attention.extend(q, k, v, state, **gates)), state=state)


def state_at(read: Callable[[int], Any], n: int, window: int) -> Any:
    """Make the state after n tokens without the time that softmax would need to get there. `read` returns the state
    after fewer, enough to fill every window; then only the caches of softmax grow, and any keys take the same time."""

    def lengthened(cache: KeysAndValues) -> KeysAndValues:
        return KeysAndValues(*(x[..., :1, :].repeat(1, 1, n, 1) for x in (cache.k, cache.v)))

    return map_state(lengthened, read(max(1, min(n, 2 * window))), leaf=KeysAndValues)


def _tensors(setup: Setup, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values, and a gradient of the output."""
    generator, shape = torch.Generator().manual_seed(0), (setup.batch, setup.heads, n, setup.head_dim)
    return [torch.randn(shape, generator=generator, dtype=dtype).to(setup.device) for _ in range(4)]


# methods that take turns hold the same tensors: a dozen of them would otherwise need a dozen times the memory
_shared = lru_cache(maxsize=1)(_tensors)


def _attention(setup: Setup, case: Case) -> Callable[..., Tensor]:
    if case.method in PEERS:
        return build_peer(setup, case)
    sizes = {"num_heads": setup.heads, "head_dim": setup.head_dim, "window": setup.window, "max_length": case.n}
    inner = named_attention(case.method, causal=setup.causal, **sizes)
    return inner.to(device=setup.device, dtype=case.torch_dtype).eval()


@torch.no_grad()
def _gates(attention: object, setup: Setup, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the gates that a new model would make for the attention, if it needs some."""
    if not isinstance(attention, InnerAttention) or attention.needs is None:
        return {}
    sizes = {"num_key_heads": setup.heads, "key_dim": setup.head_dim}
    made = token_gates(attention.needs, setup.head_dim, **sizes)
    assert made is not None
    x = torch.randn(setup.batch, n, setup.head_dim, dtype=dtype, device=setup.device)
    return {"gates": made.to(x)(x)}


def _flop(attention: object, setup: Setup, case: Case) -> float:
    """Count the products that the method needs. Softmax has qkᵀ and the product with v, and 7 such with gradients."""
    d, tokens, training = setup.head_dim, setup.batch * setup.heads * case.n, case.workload == TRAINING
    if isinstance(attention, SoftmaxAttention):
        return tokens * 4 * case.n * d * (0.5 if setup.causal else 1) * (3.5 if training else 1)
    if not isinstance(attention, LinearAttention):
        return 0.0
    sample = torch.zeros(1, setup.heads, 1, d, dtype=case.torch_dtype, device=setup.device)
    features = num_features(attention.feature_map, sample)
    return operator_flop(tokens, features, d, causal=setup.causal, training=training)


@torch.no_grad()
def num_features(feature_map: FeatureMap, queries: Tensor) -> int:
    return feature_map.query(queries).x.shape[-1]


def operator_flop(tokens: int, features: int, channels: int, *, causal: bool, training: bool) -> float:
    """Count FLOP: qkᵀ, its product with v, qS and kᵀv in chunks (13 with gradients); over all keys kᵀv and qS (6)."""
    over_all = 4 * features * channels
    if causal:
        return tokens * (2 * BLOCK * (features + channels) + over_all) * (13 / 4 if training else 1)
    return tokens * over_all * (3 if training else 1)


def batched_products(device: str, dtype: torch.dtype) -> Workload:
    """Multiply batches of 64 × 64 × 64 blocks. Their rate is the most that chunked attention can reach."""
    batch = 64 if torch.device(device).type == "cpu" else 16384
    a, b, out = (torch.randn(batch, BLOCK, BLOCK, dtype=dtype, device=device) for _ in range(3))
    return Workload(lambda: torch.bmm(a, b, out=out), batch * 2.0 * BLOCK**3)


def _model_training(setup: Setup, case: Case) -> Workload:
    """Take the loss, its gradients and a step of AdamW, in half precision by autocast, as `linattn train` does it."""
    model, tokens = _model(setup, case, torch.float32).train(), _tokens(setup, case.n + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def call() -> object:
        optimizer.zero_grad()
        with torch.autocast(model.device.type, case.torch_dtype, enabled=case.torch_dtype != torch.float32):
            loss = next_token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        return optimizer.step()

    return Workload(call)


def _model_prefill(setup: Setup, case: Case) -> Workload:
    """Read a prompt, and write the first new token."""
    model, tokens = _model(setup, case, case.torch_dtype), _tokens(setup, case.n)
    return Workload(lambda: next(stream(model, tokens, max_new_tokens=1)))


@torch.no_grad()
def _model_decoding(setup: Setup, case: Case) -> Workload:
    model, token = _model(setup, case, case.torch_dtype), _tokens(setup, 1)
    state = state_at(lambda n: model.extend(_tokens(setup, n))[1], case.n, model.config.window)
    return Workload(torch.inference_mode()(lambda: model.extend(token, state)), state=state)


def _model(setup: Setup, case: Case, dtype: torch.dtype) -> LanguageModel:
    """Make the default model but for its attention."""
    config = LanguageModelConfig(vocab_size=VOCABULARY, attention=case.method)
    return LanguageModel(config).to(device=setup.device, dtype=dtype).eval()


def _tokens(setup: Setup, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (setup.batch, n), generator=generator).to(setup.device)


PREPARE: dict[str, Callable[[Setup, Case], Workload]] = {
    FORWARD: _attending,
    TRAINING: _attending,
    DECODING: _decoding,
    MODEL_TRAINING: _model_training,
    MODEL_PREFILL: _model_prefill,
    MODEL_DECODING: _model_decoding,
}
