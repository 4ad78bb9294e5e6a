"""The backend of short sequences, over everything that it claims to run; what it does not run is another backend's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import ELEMENTWISE, LinearState, causal_linear_attention, explain_backend
from tests import laws
from tests.laws import tokens
from tests.recurrence import recurrence, relative, rounded

every_normalization = pytest.mark.parametrize("normalize", ["output", None])


def attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, key_mask=None: causal_linear_attention(
        q, k, v, key_mask=key_mask, backend="parallel", **options
    )[0]


def everything(backend: str, leaves: list[Tensor], parts: str, **options: Any) -> list[Tensor]:
    """The outputs named in `parts`, y, S and z, and the gradients of what they are made of."""
    q, k, v, *sums = leaves
    y, state = causal_linear_attention(q, k, v, LinearState(*sums) if sums else None, backend=backend, **options)
    results = [x for name, x in (("y", y), ("S", state.S), ("z", state.z)) if name in parts]
    torch.manual_seed(0)
    upstream = [torch.randn_like(x) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, upstream, allow_unused=True, materialize_grads=True)]


@every_normalization
@pytest.mark.parametrize("feature_map", ["identity", "elu_plus_one", "softplus"])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 128])
@pytest.mark.parametrize("fresh", [True, False])
def test_agrees_with_the_definition(normalize: str | None, feature_map: str, n: int, fresh: bool) -> None:
    sums = [] if fresh else [torch.randn(2, 3, 5, 3), torch.rand(2, 3, 5) + 1]
    leaves = [x.double().requires_grad_() for x in (*tokens(n, positive=feature_map == "identity"), *sums)]
    options = {"normalize": normalize, "feature_map": feature_map, "key_mask": laws.masks(n)["holes"]}
    for parts in ("ySz", "y", "S", "z"):
        ours, theirs = (everything(backend, leaves, parts, **options) for backend in ("parallel", "reference"))
        assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@every_normalization
@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 3, 1), (2, 1, 1)), ((4,), (), (1,)), ((1, 3), (5, 1), (3,))])
def test_leading_dimensions_broadcast(normalize: str | None, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Queries that share keys, keys that share values, in outputs and all gradients."""
    leaves = [torch.rand(*lead, 20, 4, dtype=torch.float64, requires_grad=True) for lead in shapes]
    ours, theirs = (everything(backend, leaves, "ySz", normalize=normalize) for backend in ("parallel", "reference"))
    assert_close(ours, theirs)


@every_normalization
def test_second_derivatives(normalize: str | None) -> None:
    inputs = [torch.rand(2, 3, d, dtype=torch.float64, requires_grad=True) for d in (2, 2, 1)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y, state = causal_linear_attention(q, k, v, backend="parallel", normalize=normalize, feature_map="elu_plus_one")
        return y, state.S, state.z

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@every_normalization
@pytest.mark.parametrize("feature_map", ELEMENTWISE)
def test_second_derivatives_of_every_map_agree_with_the_definition(normalize: str | None, feature_map: str) -> None:
    """Where squared ReLU is flat too, though the root in its derivative, 2 √φ(x), is not."""
    leaves = [x.requires_grad_() for x in tokens(20, positive=feature_map == "identity")]
    results = []
    for backend in ("parallel", "reference"):
        y, _ = causal_linear_attention(*leaves, backend=backend, normalize=normalize, feature_map=feature_map)
        gradients = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.sin().sum() for g in gradients), leaves))
    assert_close(*results, rtol=1e-9, atol=1e-9)


@every_normalization
def test_laws(normalize: str | None) -> None:
    attend = attention(normalize=normalize, feature_map="elu_plus_one")
    for at in (1, 50, 90):
        laws.the_past_does_not_see_the_future(attend, *tokens(100), at)
    laws.the_last_token_sees_everything(attend, *tokens(100))
    laws.batch_elements_do_not_mix(attend, *tokens(100))
    laws.inputs_are_not_modified(attend, *tokens(100), laws.masks(100)["holes"])
    for mask in laws.masks(70).values():
        laws.a_masked_key_is_a_missing_key(attend, *tokens(70), mask)
    for rubbish in (torch.nan, torch.inf, -torch.inf):
        mask = laws.masks(70)["holes"]
        laws.a_masked_token_has_no_effect_on_gradients(attend, *tokens(70), mask, rubbish, queries=True)


@every_normalization
def test_vmap_and_its_gradients_are_loops(normalize: str | None) -> None:
    q, k, v = tokens(30)
    attend = attention(normalize=normalize, feature_map="elu_plus_one")
    gradient = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=(0, 1, 2))
    together = torch.func.vmap(gradient, in_dims=(0, None, 0))(q, k[0], v)
    apart = zip(*(gradient(q[i], k[0], v[i]) for i in range(2)), strict=True)
    assert_close(together, tuple(torch.stack(g) for g in apart))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_normalization
@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
def test_gradients_of_half_precision(dtype: torch.dtype, normalize: str | None, mean: float) -> None:
    exact = [rounded(2, 128, 8), rounded(2, 128, 8), rounded(2, 128, 8, mean=mean)]
    exact += [rounded(2, 8, 8, mean=mean), rounded(2, 8).abs() + 1]
    leaves = [x.to(dtype if i < 3 else torch.float32).requires_grad_() for i, x in enumerate(exact)]
    exact = [x.requires_grad_() for x in exact]
    results = recurrence(*exact, None, normalize)
    upstream = [rounded(*x.shape) for x in results]
    given = [x.to(dtype if i == 0 else torch.float32) for i, x in enumerate(upstream)]
    options = {"normalize": normalize, "feature_map": "elu_plus_one", "backend": "parallel"}
    y, state = causal_linear_attention(*leaves[:3], LinearState(*leaves[3:]), **options)
    ours = torch.autograd.grad((y, state.S, state.z), leaves, given)
    expected = torch.autograd.grad(results, exact, upstream)
    errors = [relative(a, b) for a, b in zip(ours, expected, strict=True)]
    assert max(errors) <= (1e-2 if dtype == torch.bfloat16 else 2e-3), errors


def test_short_sequences_take_it_and_others_say_why_not() -> None:
    q, k, v = tokens(64, dtype=torch.float32)
    assert "parallel: runs this call" in explain_backend(q, k, v)
    for inputs, options in (
        (tokens(129), {}),
        ([torch.rand(3000, 100, 2)] * 3, {}),
        ((q, k, v), {"log_decay": -q[..., 0].abs()}),
        ((q, k, v), {"normalize": "keys"}),
    ):
        assert "chunked: runs this call" in explain_backend(*inputs, **options)
        with pytest.raises(NotImplementedError, match="parallel: "):
            causal_linear_attention(*inputs, **options, backend="parallel")
