"""The workloads of `linattn bench`: attentions on random queries, keys and values."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from linattn.attention import InnerAttention, map_state, named_attention
from linattn.attention.base import KeysAndValues
from linattn.cli.bench import DECODING, FORWARD
from linattn.cli.bench.measure import Workload
from linattn.cli.bench.record import Case, Setup
from linattn.nn.gates import token_gates


def prepare(setup: Setup, case: Case) -> Workload:
    """Return the workload of a named attention on random inputs, with gates of untrained weights if it needs any."""
    torch.manual_seed(0)
    attention = build_attention(setup, case.method, case.n).to(device=setup.device, dtype=case.torch_dtype).eval()
    if case.workload == DECODING:
        return _decoding(attention, setup, case)
    return attention_workload(attention, setup, case, **_gates(attention, setup, case.n, case.torch_dtype))


def build_attention(setup: Setup, name: str, n: int) -> InnerAttention:
    sizes = {"num_heads": setup.heads, "head_dim": setup.head_dim, "window": setup.window, "max_length": n}
    return named_attention(name, causal=setup.causal, **sizes)


def attention_workload(attention: Callable[..., Tensor], setup: Setup, case: Case, **gates: Any) -> Workload:
    """Return the workload of `attention`, any function of q, k and v. It is a forward pass if the workload of `case` is
    "forward", otherwise a forward and a backward pass, with the gradients of inputs and weights."""
    q, k, v, upstream = _tensors(setup, case.n, case.torch_dtype)
    if case.workload == FORWARD:
        return Workload(torch.no_grad()(lambda: attention(q, k, v, **gates)))
    inputs = [q, k, v]
    map_state(inputs.append, tuple(gates.values()))
    weights = list(attention.parameters()) if isinstance(attention, nn.Module) else []
    wanted = [x.requires_grad_() for x in inputs] + weights
    # an attention may ignore some of its inputs
    return Workload(lambda: torch.autograd.grad(attention(q, k, v, **gates), wanted, upstream, allow_unused=True))


@torch.no_grad()
def _decoding(attention: InnerAttention, setup: Setup, case: Case) -> Workload:
    def extension(n: int, state: object) -> Callable[[], tuple[Tensor, Any]]:
        (q, k, v, _), gates = _tensors(setup, n, case.torch_dtype), _gates(attention, setup, n, case.torch_dtype)
        return torch.no_grad()(lambda: attention.extend(q, k, v, state, **gates))

    state = state_at(lambda n: extension(n, None)()[1], case.n, setup.window)
    return Workload(extension(1, state), state)


def state_at(state_after: Callable[[int], Any], n: int, window: int) -> Any:
    """Return a state with which a call takes as long as with the state after n tokens, which would take too long to
    compute. `state_after` reads at most 2 · `window` tokens, which fill every window. The caches of softmax, which
    further tokens only lengthen, get n copies of one key and value: the time of a call does not depend on the numbers
    in them."""

    def lengthened(cache: KeysAndValues) -> KeysAndValues:
        return KeysAndValues(*(x[..., :1, :].repeat(1, 1, n, 1) for x in (cache.k, cache.v)))

    return map_state(lengthened, state_after(max(1, min(n, 2 * window))), leaf=KeysAndValues)


# methods that take turns share the same tensors: a dozen of them would otherwise need a dozen times the memory
@lru_cache(maxsize=1)
def _tensors(setup: Setup, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values, and a gradient of the output."""
    generator, shape = torch.Generator().manual_seed(0), (setup.batch, setup.heads, n, setup.head_dim)
    return [torch.randn(shape, generator=generator, dtype=dtype).to(setup.device) for _ in range(4)]


@torch.no_grad()
def _gates(attention: InnerAttention, setup: Setup, n: int, dtype: torch.dtype) -> dict[str, Any]:
    gates = token_gates(attention.needs, setup.head_dim, num_key_heads=setup.heads, key_dim=setup.head_dim)
    x = torch.randn(setup.batch, n, setup.head_dim, dtype=dtype, device=setup.device)
    return {} if gates is None else {"gates": gates.to(x)(x)}
