"""Heads that share queries and keys, with decays of their own: the laws of the operator, for the form that reads q and
k once."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, explain_backend
from linattn.ops.backends import CAUSAL, SHARED, shared
from linattn.ops.linear import causal_call, operator_of

LENGTHS = (2, 63, 64, 65, 200)
FORMS = ("chunked", "loopless")
HEADS, F, DV = 4, 5, 3

every_form = pytest.mark.parametrize("form", FORMS)


def inputs(n: int, dtype: torch.dtype = torch.float64, lead: tuple[int, ...] = (2,)) -> list[Tensor]:
    """q, k, v, log_decay, S, z, in a layout with a token's heads side by side."""
    q, k = (torch.randn(*lead, 1, n, F, dtype=dtype) for _ in range(2))
    v = torch.randn(*lead, n, HEADS, DV, dtype=dtype).transpose(-2, -3)
    log_decay = -0.3 * torch.rand(*lead, n, HEADS, dtype=dtype).mT
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    S, z = torch.randn(*lead, HEADS, F, DV, dtype=exact), torch.randn(*lead, HEADS, F, dtype=exact)
    return [x.requires_grad_() for x in (q, k, v, log_decay, S, z)]


def run(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor, z: Tensor, form: str = "chunked"
) -> list[Tensor]:
    state = LinearState(S, z)
    y, (S, z) = causal_linear_attention(q, k, v, state, log_decay=log_decay, normalize=None, backend=form)
    return [y, S, z]


def with_gradients(given: list[Tensor], form: str, upstream: list[Tensor]) -> list[Tensor]:
    results = run(*given, form)
    return [*results, *torch.autograd.grad(results, given, upstream)]


def upstream(given: list[Tensor]) -> list[Tensor]:
    return [torch.randn_like(x) for x in run(*given, "reference")]


def assert_agree(given: list[Tensor], form: str) -> None:
    above = upstream(given)
    for found, expected in zip(
        with_gradients(given, form, above), with_gradients(given, "reference", above), strict=True
    ):
        assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("n", LENGTHS)
@every_form
def test_agrees_with_the_definition(form, n, lead):
    assert_agree(inputs(n, lead=lead), form)


@pytest.mark.parametrize("n", (70, 130))
def test_agrees_with_the_definition_over_many_blocks(n, monkeypatch):
    monkeypatch.setattr(shared, "BLOCK", 1)
    assert_agree(inputs(n), "chunked")


@every_form
def test_strong_decays_and_new_sequences(form):
    given = inputs(100)
    with torch.no_grad():
        given[3][:, 0] = -20
        given[3][:, 1, 40] = given[3][:, 1, 64] = -torch.inf
        given[3][:, 2, 0] = -torch.inf
    assert_agree(given, form)


def test_a_decay_of_infinity_begins_a_new_sequence():
    q, k, v, log_decay, S, z = (x.detach() for x in inputs(50))
    log_decay[..., 20] = -torch.inf
    y, end, sums = run(q, k, v, log_decay, S, z)
    later = (x[..., 20:, :] for x in (q, k, v))
    y2, end2, sums2 = run(*later, log_decay[..., 20:], torch.zeros_like(S), torch.zeros_like(z))
    assert_close(y[..., 20:, :], y2)
    assert_close((end, sums), (end2, sums2))


@torch.no_grad()
@pytest.mark.parametrize("at", (2, 16, 31, 64))
def test_pieces_make_the_whole(at):
    q, k, v, log_decay, S, z = inputs(70)
    y, *states = run(q, k, v, log_decay, S, z)
    parts = []
    for piece in (slice(0, at), slice(at, 70)):
        y_piece, S, z = run(*(x[..., piece, :] for x in (q, k, v)), log_decay[..., piece], S, z)
        parts.append(y_piece)
    assert_close(torch.cat(parts, -2), y)
    assert_close([S, z], states)


@torch.no_grad()
def test_the_past_does_not_see_the_future():
    q, k, v, log_decay, S, z = inputs(100)
    before = run(q, k, v, log_decay, S, z)[0]
    k[..., 60:, :], v[..., 60:, :] = 1000, 7
    assert_close(run(q, k, v, log_decay, S, z)[0][..., :60, :], before[..., :60, :], rtol=0, atol=0)


def test_inputs_that_broadcast_have_gradients_of_their_shape():
    q, k, v, log_decay, S, z = inputs(20)
    small = [q[:1], k[:1], v[:1], log_decay[:1, :, :1], S, z]
    small = [x.detach().clone().requires_grad_() for x in small]
    assert_agree(small, "chunked")
    small[2] = torch.randn(2, 1, 20, DV, dtype=torch.float64, requires_grad=True)
    assert_agree(small, "chunked")


def test_derivatives_of_the_second_order():
    given = inputs(3, lead=())
    assert torch.autograd.gradgradcheck(lambda *x: tuple(run(*x)), given, fast_mode=True)


def test_vmap_and_its_gradients():
    given = [x.detach() for x in inputs(30)]

    def loss(*x: Tensor) -> Tensor:
        return sum(y.square().sum() for y in run(*x))

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(*given)
    assert_close(each, torch.func.grad(loss, argnums=(0, 1, 2, 3))(*given))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_half_precision_is_near_to_float64(dtype, bound):
    given = inputs(300, dtype)
    with torch.no_grad():
        given[2] += 1
    above = [x.to(y.dtype) for x, y in zip(upstream(given), run(*given), strict=True)]
    exact = [x.detach().double().requires_grad_() for x in given]
    found = with_gradients(given, "chunked", above)
    expected = with_gradients(exact, "reference", [x.double() for x in above])
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).norm() <= bound * y.norm()


@torch.no_grad()
@pytest.mark.parametrize("full", [True, False])
def test_results_have_the_layout_that_graphs_expect(full):
    given = inputs(40)
    if not full:
        given[2], given[3] = given[2][:1], given[3][:, :1]
    call = causal_call(*given[:3], LinearState(*given[4:]), given[3], None, None, "identity")
    backend = next(each for each in SHARED.backends if each.name == "chunked")
    results = backend.forward(call, True)
    above = tuple(torch.randn_like(x) for x in results[:3])
    pairs = list(zip(results, backend.empty(call, True), strict=True))
    pairs += zip(backend.gradient(call, results[3:], above)[:6], backend.empty_gradient(call)[:6], strict=True)
    for found, expected in pairs:
        assert found.shape == expected.shape and found.dtype == expected.dtype
        # the stride of a single place says nothing
        places = [i for i, size in enumerate(found.shape) if size > 1]
        assert [found.stride(i) for i in places] == [expected.stride(i) for i in places]


def test_only_such_calls_take_it():
    q, k, v, log_decay, _, _ = inputs(20)

    def operator(q: Tensor, k: Tensor, log_decay: Tensor | None, normalize: str | None = None) -> object:
        return operator_of(causal_call(q, k, v, None, log_decay, None, normalize, "identity"))

    assert operator(q, k, log_decay) is SHARED
    every_head = q.expand(-1, HEADS, -1, -1)
    for call in ((every_head, k, log_decay), (q, k.expand(-1, HEADS, -1, -1), log_decay), (q, k, None)):
        assert operator(*call) is CAUSAL
    assert operator(q, k, log_decay, "output") is CAUSAL
    # here rows of queries share states
    assert operator_of(causal_call(q, k[:1], v[:1], None, log_decay[:1], None, None, "identity")) is CAUSAL
    assert "chunked: runs this call" in explain_backend(q, k, v, log_decay=log_decay, normalize=None)
    assert "triton: needs CUDA tensors" in explain_backend(q, k, v, log_decay=log_decay, normalize=None)
