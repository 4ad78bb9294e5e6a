"""What only a GPU shows: launches, graphs, compiled kernels, tensors that 32 bits cannot index."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, linear_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIONS = {"feature_map": "elu_plus_one", "backend": "triton"}


def tokens(n: int, *, heads: int = 2, d: int = 64, grad: bool = False) -> list[Tensor]:
    make = [torch.randn(2, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [x.requires_grad_(grad) for x in make]


def launches(call: Callable[[], object]) -> list[str]:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_gpu]


def test_a_step_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    # tests fill new memory, by launches of their own
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    q, k, v = tokens(1)
    _, state = causal_linear_attention(q, k, v, **OPTIONS)
    assert launches(lambda: causal_linear_attention(q, k, v, state, **OPTIONS)) == ["step"]


def test_a_new_length_is_no_new_kernel() -> None:
    from linattn.ops.triton import causal_gradient_kernels, causal_kernels

    def train(n: int) -> None:
        inputs = tokens(n, grad=True)
        causal_linear_attention(*inputs, **OPTIONS)[0].square().sum().backward()

    def compiled() -> list[int]:
        kernels = (
            causal_kernels.forward,
            causal_gradient_kernels.query_gradient,
            causal_gradient_kernels.key_gradients,
        )
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    for n in (700, 701, 30_000):
        train(n)
    before = compiled()
    for n in (2, 63, 64, 65, 512, 1000, 4097, 50_000):
        train(n)
    assert compiled() == before


def test_a_captured_graph_decodes() -> None:
    q, k, v = tokens(1)
    state = LinearState(torch.zeros(2, 2, 64, 64, device="cuda"), torch.zeros(2, 2, 64, device="cuda"))
    causal_linear_attention(q, k, v, state, **OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, after = causal_linear_attention(q, k, v, state, **OPTIONS)
        for mine, new in zip(state[:2], after[:2], strict=True):
            mine.copy_(new)
    expected = LinearState(state.S.clone().zero_(), state.z.clone().zero_())
    state.S.zero_()
    state.z.zero_()
    for _ in range(5):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        exact, expected = causal_linear_attention(q, k, v, expected, feature_map="elu_plus_one", backend="recurrent")
        assert_close(y, exact, rtol=2e-2, atol=2e-2)
    assert_close(state.S, expected.S, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "attend", [lambda *x: causal_linear_attention(*x, **OPTIONS)[0], lambda *x: linear_attention(*x, **OPTIONS)]
)
def test_a_captured_graph_trains(attend: Callable[..., Tensor]) -> None:
    inputs, upstream = tokens(300, grad=True), torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        expected = torch.autograd.grad(attend(*inputs), inputs, upstream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = torch.autograd.grad(attend(*inputs), inputs, upstream)
    graph.replay()
    assert_close(gradients, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode: str) -> None:
    """The layer's projections are compiled around the kernels, whose inputs may then lie otherwise."""
    projection = torch.nn.Linear(128, 384, device="cuda", dtype=torch.bfloat16)

    def layer(x: Tensor) -> Tensor:
        q, k, v = projection(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        return causal_linear_attention(q, k, v, **OPTIONS)[0].transpose(1, 2).flatten(-2)

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for n in (70, 70, 131):
        x = torch.randn(2, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y, expected = compiled(x), layer(x)
        assert_close(y, expected, rtol=2e-2, atol=2e-2)
        ours, theirs = (torch.autograd.grad(z.square().sum(), x)[0] for z in (y, expected))
        assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 * 2**30, reason="needs 60 GB"
)
def test_more_numbers_than_32_bits_count() -> None:
    """The last row, beyond 2³¹ numbers, is what it is alone; and so are the last tokens of a long sequence."""
    q = torch.randn(2**31 // (4096 * 64) + 1, 1, 4096, 64, device="cuda", dtype=torch.bfloat16)
    y, _ = causal_linear_attention(q, q, q, **OPTIONS)
    alone, _ = causal_linear_attention(q[-1:], q[-1:], q[-1:], **OPTIONS)
    assert_close(y[-1:], alone, rtol=2e-2, atol=2e-2)
    del y, alone
    # tokens lie 4,096 numbers apart
    n = 2**31 // 4096 + 100
    x = torch.randn(n, 64, 64, device="cuda", dtype=torch.bfloat16)[:, :1].transpose(0, 1)
    y, _ = causal_linear_attention(x, x, x, normalize=None, **OPTIONS)
    mine = x.contiguous()
    assert_close(y, causal_linear_attention(mine, mine, mine, normalize=None, **OPTIONS)[0], rtol=0, atol=0)


def test_half_precision_at_length() -> None:
    q, k, v = tokens(16_384)
    inputs = [x.requires_grad_() for x in (q, k, v + 1)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y, _ = causal_linear_attention(*inputs, **OPTIONS)
    expected, _ = causal_linear_attention(*exact, feature_map="elu_plus_one", backend="chunked")
    assert (y.double() - expected).norm() <= 2 * torch.finfo(torch.bfloat16).eps * expected.norm()
    upstream = torch.randn_like(y)
    ours, theirs = torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()
