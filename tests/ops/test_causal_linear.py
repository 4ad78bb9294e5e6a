"""The laws of `causal_linear_attention`, over its backends, normalisations, decays and elementwise maps."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import ELEMENTWISE, LinearState, causal_linear_attention
from linattn.ops.operators import CAUSAL
from tests import laws
from tests.laws import LENGTHS, tokens

NORMALIZATIONS = ("output", "keys", None)

# the kernels are tested by tests/ops/triton, as they need a GPU or an interpreter, and have no float64
every_backend = pytest.mark.parametrize("backend", [name for name in CAUSAL.run if name not in ("triton", "parallel")])
every_normalization = pytest.mark.parametrize("normalize", NORMALIZATIONS)


def attention(backend: str, **options: Any) -> Callable[..., Tensor]:
    """y of the backend: the recurrent one is given token after token."""

    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return run(q, k, v, backend=backend, key_mask=key_mask, **options)[0]

    return attend


def run(
    q: Tensor, k: Tensor, v: Tensor, state: LinearState | None = None, *, backend: str, **options: Any
) -> tuple[Tensor, LinearState]:
    if backend != "recurrent" or q.shape[-2] == 0:
        backend = "chunked" if backend == "recurrent" else backend
        return causal_linear_attention(q, k, v, state, backend=backend, **options)
    ys = []
    for i in range(q.shape[-2]):
        here = {
            name: x[..., i : i + 1] if isinstance(x, Tensor) and x.shape[-1] > 1 else x for name, x in options.items()
        }
        q_i, k_i, v_i = (x[..., i : i + 1, :] for x in (q, k, v))
        y, state = causal_linear_attention(q_i, k_i, v_i, state, backend=backend, **here)
        ys.append(y)
    assert state is not None
    return torch.cat(ys, -2), state


def definition(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, key_mask: Tensor, normalize: str | None
) -> Tensor:
    """Row by row, from the formula: weights of each key at each query, masked tokens taken out."""
    y = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for row, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        present = key_mask[row, 0]
        for i in range(q.shape[-2]):
            weights = torch.zeros(q.shape[-2], dtype=q.dtype)
            for j in range(i + 1):
                if present[j]:
                    weights[j] = log_decay[row, head, j + 1 : i + 1][present[j + 1 : i + 1]].sum().exp()
            features = weights[:, None] * k[row, head]
            query = q[row, head, i]
            if normalize == "keys":
                query = query / features.sum(0)
            similarity = features @ query
            total = similarity.sum() if normalize == "output" else 1
            y[row, head, i] = (similarity / total) @ v[row, head] if weights.any() else 0
    return y


@every_backend
@every_normalization
def test_agrees_with_the_formula(backend: str, normalize: str | None) -> None:
    q, k, v = tokens(20, positive=True)
    log_decay = -torch.rand(2, 3, 20, dtype=q.dtype)
    log_decay[0, 0, 11] = -torch.inf
    options = {"log_decay": log_decay, "key_mask": laws.masks(20)["holes"], "normalize": normalize}
    y, _ = run(q, k, v, backend=backend, **options)
    assert_close(y, definition(q, k, v, **options))


def everything(backend: str, n: int, *, decayed: bool = True, **options: Any) -> list[Tensor]:
    """Outputs, states and gradients of all that has one, for one set of inputs."""
    torch.manual_seed(n)
    q, k, v = tokens(n, positive=options.get("feature_map", "identity") == "identity")
    log_decay = -torch.rand(2, 3, n, dtype=q.dtype)
    log_decay[torch.rand(2, 3, n) < 0.03] = -torch.inf
    state = LinearState(torch.randn(2, 3, 5, 3, dtype=q.dtype), torch.rand(2, 3, 5, dtype=q.dtype) + 1)
    leaves = [x.requires_grad_() for x in (q, k, v, log_decay, state.S, state.z)]
    mask = laws.masks(n)["holes"]
    options["log_decay"] = log_decay if decayed else None
    y, after = run(q, k, v, state, backend=backend, key_mask=mask, **options)
    results = [y, after.S, after.z]
    loss = torch.stack([(x * torch.randn_like(x)).sum() for x in results]).sum()
    return [*results, *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)]


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@every_normalization
@pytest.mark.parametrize("feature_map", ["identity", "elu_plus_one"])
@pytest.mark.parametrize("n", LENGTHS)
def test_outputs_states_and_gradients_agree_with_the_definition(
    backend: str, normalize: str | None, feature_map: str, n: int
) -> None:
    if backend == "recurrent" and n > 65:
        n = 100
    options = {"normalize": normalize, "feature_map": feature_map}
    for ours, theirs in zip(everything(backend, n, **options), everything("reference", n, **options), strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@every_normalization
@pytest.mark.parametrize("n", LENGTHS)
def test_without_decay_it_agrees_with_the_definition_too(normalize: str | None, n: int) -> None:
    options = {"normalize": normalize, "feature_map": "elu_plus_one", "decayed": False}
    expected = everything("reference", n, **options)
    for x, y in zip(everything("chunked", n, **options), expected, strict=True):
        assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("feature_map", ELEMENTWISE)
@every_backend
def test_a_map_by_name_is_the_map_outside(feature_map: str, backend: str) -> None:
    inputs = [x.requires_grad_() for x in tokens(70)]
    phi = ELEMENTWISE[feature_map].function
    inside, _ = run(*inputs, backend=backend, feature_map=feature_map, normalize=None)
    outside, _ = causal_linear_attention(phi(inputs[0]), phi(inputs[1]), inputs[2], normalize=None, backend="reference")
    upstream = torch.randn_like(inside)
    assert_close(inside, outside)
    assert_close(torch.autograd.grad(inside, inputs, upstream), torch.autograd.grad(outside, inputs, upstream))


@every_backend
@every_normalization
def test_pieces_make_the_whole(backend: str, normalize: str | None) -> None:
    """The pieces of the recurrent form are single tokens, however they are cut."""
    alone = backend == "recurrent"
    n = 20 if alone else 200
    q, k, v = tokens(n)
    log_decay, mask = -torch.rand(2, 3, n, dtype=q.dtype), laws.masks(n)["holes"]
    options = {"backend": backend, "normalize": normalize, "feature_map": "elu_plus_one"}
    undivided = options | {"backend": "chunked"} if alone else options
    whole, end = run(q, k, v, log_decay=log_decay, key_mask=mask, **undivided)
    for cuts in [(1, 2, 3)] if alone else [(1, 2, 3), (64,), (63, 64, 65), (10, 150), tuple(range(60, 80))]:
        ys, state = [], None
        for start, stop in itertools.pairwise((0, *cuts, n)):
            part = [x[..., start:stop, :] for x in (q, k, v)]
            here = {"log_decay": log_decay[..., start:stop], "key_mask": mask[..., start:stop]}
            y, state = run(*part, state, **here, **options)
            ys.append(y)
        assert state is not None
        assert_close(torch.cat(ys, -2), whole)
        assert_close(state, end)


@every_backend
@every_normalization
def test_gradients_flow_through_the_pieces(backend: str, normalize: str | None) -> None:
    inputs = [x.requires_grad_() for x in tokens(70, positive=True)]
    whole, _ = run(*inputs, backend=backend, normalize=normalize)
    first, state = run(*(x[..., :40, :] for x in inputs), backend=backend, normalize=normalize)
    second, _ = run(*(x[..., 40:, :] for x in inputs), state, backend=backend, normalize=normalize)
    upstream = torch.randn_like(whole)
    assert_close(
        torch.autograd.grad(torch.cat([first, second], -2), inputs, upstream),
        torch.autograd.grad(whole, inputs, upstream),
    )


@every_backend
@every_normalization
def test_the_past_does_not_see_the_future(backend: str, normalize: str | None) -> None:
    for at in (1, 60, 64, 90):
        laws.the_past_does_not_see_the_future(attention(backend, normalize=normalize), *tokens(100, positive=True), at)


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@pytest.mark.parametrize("rubbish", [torch.inf, torch.nan])
def test_not_even_an_infinite_future(backend: str, rubbish: float) -> None:
    q, k, v = tokens(100, positive=True)
    before = attention(backend)(q, k, v)
    k[..., 60:, :] = rubbish
    assert_close(attention(backend)(q, k, v)[..., :60, :], before[..., :60, :], rtol=0, atol=0)


@every_backend
@pytest.mark.parametrize("n", LENGTHS[1:])
def test_the_last_token_sees_everything(backend: str, n: int) -> None:
    laws.the_last_token_sees_everything(attention(backend), *tokens(n, positive=True))


@every_backend
@every_normalization
@pytest.mark.parametrize("kind", ["left", "holes", "all"])
def test_a_masked_key_is_a_missing_key(backend: str, normalize: str | None, kind: str) -> None:
    for n in (1, 12) if backend == "recurrent" else (1, 65, 100):
        log_decay = torch.tensor(-0.1, dtype=torch.float64).expand(3, 1)
        attend = attention(backend, normalize=normalize, feature_map="softplus", log_decay=log_decay)
        laws.a_masked_key_is_a_missing_key(attend, *tokens(n), laws.masks(n)[kind])


@every_backend
@every_normalization
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf])
def test_what_a_masked_token_holds_reaches_no_gradient(backend: str, normalize: str | None, rubbish: float) -> None:
    for n in (1, 9) if backend == "recurrent" else (1, 70):
        for feature_map in ("softplus", "elu_plus_one"):
            attend = attention(backend, normalize=normalize, feature_map=feature_map)
            mask = laws.masks(n)["holes"]
            laws.a_masked_token_has_no_effect_on_gradients(attend, *tokens(n), mask, rubbish, queries=True)


@every_backend
@every_normalization
def test_batch_elements_do_not_mix(backend: str, normalize: str | None) -> None:
    laws.batch_elements_do_not_mix(attention(backend, normalize=normalize), *tokens(100, positive=True))


@every_backend
@pytest.mark.parametrize("normalize", ["output", "keys"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_features_may_be_scaled(backend: str, normalize: str, scale: float) -> None:
    """So constant values come back too, however small the features are: with "keys", times the query's sum."""
    q, k, v = tokens(100, positive=True)
    attend = attention(backend, normalize=normalize)
    assert_close(attend(q, scale * k, v), attend(q, k, v))
    q = q / q.sum(-1, keepdim=True) if normalize == "keys" else scale * q
    laws.constant_values_come_back(attend, q, k, v)
    q, k, v = (x.float() for x in (q, k, v))
    laws.constant_values_come_back(attend, q, k * scale, v, rtol=1e-5, atol=1e-5)


@every_backend
def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in tokens(70))
    y, _ = run(q, k, v, backend=backend, feature_map="relu", key_mask=torch.arange(70) > 50)
    assert torch.equal(y[..., :51, :], torch.zeros_like(y[..., :51, :]))
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert not gradients[0][..., :51, :].any() and not gradients[2][..., :51, :].any()


@every_backend
def test_an_infinite_decay_begins_a_new_sequence(backend: str) -> None:
    q, k, v = tokens(150, positive=True)
    log_decay = -torch.rand(2, 3, 150, dtype=q.dtype)
    starts = (0, 1, 40, 64, 128)
    log_decay[..., starts] = -torch.inf
    y, _ = run(q, k, v, backend=backend, log_decay=log_decay)
    for start, stop in itertools.pairwise((*starts, 150)):
        alone, _ = run(
            *(x[..., start:stop, :] for x in (q, k, v)), backend=backend, log_decay=log_decay[..., start:stop]
        )
        assert_close(y[..., start:stop, :], alone)


@every_backend
def test_a_long_steep_decay_stays_exact(backend: str) -> None:
    """Sums of logarithms reach −10⁵ here; weights between neighbours must not feel that."""
    q, k, v = (x.float() for x in tokens(200, positive=True))
    log_decay = torch.full((200,), -0.01)
    log_decay[::3] = -1000
    y, _ = run(q, k, v, backend=backend, log_decay=log_decay)
    exact, _ = run(*(x.double() for x in (q, k, v)), backend="reference", log_decay=log_decay.double())
    assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)


@every_backend
def test_grouped_queries_share_a_key_head(backend: str) -> None:
    q, k, v = torch.rand(2, 3, 4, 80, 5), torch.rand(2, 3, 1, 80, 5), torch.randn(2, 3, 1, 80, 6)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    y, state = run(*inputs, backend=backend)
    assert state.S.shape == (2, 3, 1, 5, 6)
    repeated = [inputs[0], *(x.expand(2, 3, 4, 80, -1) for x in inputs[1:])]
    expected, _ = run(*repeated, backend="reference")
    assert_close(y, expected)
    upstream = torch.randn_like(y)
    assert_close(torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_leading_dimensions_broadcast(backend: str) -> None:
    """None at all, few and many; rows that share keys; strides that are not those of a copy."""
    q, k, v = torch.rand(40, 3, 90, 5), torch.rand(1, 3, 90, 5), torch.randn(90, 4)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    y, state = causal_linear_attention(*inputs, backend=backend)
    assert y.shape == (40, 3, 90, 4) and state.S.shape == (1, 3, 5, 4)
    gradients = torch.autograd.grad(y.square().sum(), inputs)
    rows = [
        causal_linear_attention(inputs[0][i, j], inputs[1][0, j], inputs[2], backend=backend)[0]
        for i in range(40)
        for j in range(3)
    ]
    apart = torch.stack(rows).view_as(y)
    assert_close(y, apart)
    assert_close(gradients, torch.autograd.grad(apart.square().sum(), inputs))
    turned = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in torch.broadcast_tensors(q, k)]
    assert_close(causal_linear_attention(*(x.double() for x in turned), inputs[2], backend=backend)[0], y)


@every_backend
@every_normalization
def test_gradcheck(backend: str, normalize: str | None) -> None:
    n = 1 if backend == "recurrent" else 5
    state = [torch.randn(1, 3, 2, dtype=torch.float64), torch.rand(1, 3, dtype=torch.float64)]
    inputs = [torch.randn(1, n, d, dtype=torch.float64) for d in (3, 3, 2)]
    log_decay = torch.randn(1, n, dtype=torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor, w: Tensor, S: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        options = {"log_decay": -w.exp(), "normalize": normalize, "feature_map": "elu_plus_one"}
        y, after = causal_linear_attention(q, k, v, LinearState(S, z), backend=backend, **options)
        return y, after.S, after.z

    arguments = [x.requires_grad_() for x in (*inputs, log_decay, *state)]
    assert torch.autograd.gradcheck(call, arguments)
    assert torch.autograd.gradgradcheck(call, arguments, fast_mode=True)


@every_backend
@every_normalization
def test_the_third_derivative(backend: str, normalize: str | None) -> None:
    n = 1 if backend == "recurrent" else 4
    inputs = [torch.randn(n, d, dtype=torch.float64, requires_grad=True) for d in (2, 2, 1)]
    inputs.append(torch.randn(n, dtype=torch.float64, requires_grad=True))

    def gradients(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        options = {"log_decay": -w.exp(), "normalize": normalize, "feature_map": "elu_plus_one"}
        y, state = causal_linear_attention(q, k, v, backend=backend, **options)
        total = y.sin().sum() + state.S.square().sum() + state.z.sum()
        return torch.autograd.grad(total, (q, k, v, w), create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_tiny_key_sums_have_finite_gradients(backend: str) -> None:
    """In float32 a sum of 1e-29 still divides: the means of values that it gives are exact."""
    q, k, v = torch.rand(2, 3, 1, 4), torch.rand(2, 3, 1, 4) * 1e-29 + 1e-29, torch.randn(2, 3, 1, 5)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y, _ = run(*leaves, backend=backend, normalize="keys")
    assert_close(y, q.sum(-1, keepdim=True) * v)
    of_q, of_k, of_v = torch.autograd.grad(y.sum(), leaves)
    assert_close(of_q, v.sum(-1, keepdim=True).expand_as(q))
    assert_close(of_v, q.sum(-1, keepdim=True).expand_as(v))
    # that of k is zero but for rounding: y does not depend on it
    assert (of_k * k).abs().max() <= 1e-5


@every_backend
def test_inputs_are_not_modified(backend: str) -> None:
    laws.inputs_are_not_modified(attention(backend, feature_map="elu_plus_one"), *tokens(70), laws.masks(70)["holes"])


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_normalization
def test_every_dtype_is_close_to_float64(backend: str, dtype: torch.dtype, normalize: str | None) -> None:
    """What differs is the rounding of inputs and outputs, one unit in the last place: sums are float32."""
    q, k, v = (x.to(dtype) for x in tokens(200))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = {"normalize": normalize, "feature_map": "elu_plus_one"}
    (y, state), (expected, _) = run(*leaves, backend=backend, **options), run(*exact, backend="reference", **options)
    assert y.dtype == dtype and state.S.dtype == state.z.dtype == torch.float32
    unit = max(torch.finfo(dtype).eps, 1e-5)
    assert (y.double() - expected).abs().max() <= unit * expected.abs().max()
    upstream = torch.randn_like(expected).to(dtype)
    for ours, theirs in zip(
        torch.autograd.grad(y, leaves, upstream), torch.autograd.grad(expected, exact, upstream.double()), strict=True
    ):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= 2 * unit * theirs.norm()


def test_bfloat16_decoding_stays_with_the_float64_run() -> None:
    q, k, v = (x.bfloat16() for x in (torch.randn(2, 4000, 8), torch.randn(2, 4000, 8), torch.randn(2, 4000, 8)))
    state, ys = None, []
    for i in range(4000):
        one = (x[:, i : i + 1] for x in (q, k, v))
        y, state = causal_linear_attention(*one, state, feature_map="elu_plus_one", backend="recurrent")
        ys.append(y)
    exact, _ = causal_linear_attention(*(x.double() for x in (q, k, v)), feature_map="elu_plus_one", backend="chunked")
    error = (torch.cat(ys, 1).double() - exact).abs()
    assert error[:, -100:].max() <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_the_state_has_one_size() -> None:
    sizes = set()
    for n in (0, 1, 64, 1000):
        _, state = causal_linear_attention(*tokens(n))
        sizes.add(tuple(tuple(x.shape) for x in state))
    assert len(sizes) == 1


def test_training_saves_no_more_than_inputs_and_a_state_per_segment() -> None:
    q, k, v = (torch.randn(1, 2, 4096, 16, requires_grad=True) for _ in range(3))
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        causal_linear_attention(q, k, v, feature_map="elu_plus_one")
    assert sum(saved.values()) <= 1.03 * sum(x.nbytes for x in (q, k, v))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.rand(2, 3, 10, 4)}, "the same number of features"),
        ({"v": torch.rand(2, 3, 9, 3)}, "every key must have a value"),
        ({"q": torch.rand(2, 3, 9, 5)}, "a query for every key"),
        ({"q": torch.rand(5)}, r"\(..., n, d\)"),
        ({"k": torch.rand(7, 3, 10, 5)}, "must broadcast"),
        ({"q": torch.zeros(2, 3, 10, 5, dtype=torch.int64), "k": torch.zeros(10, 5, dtype=torch.int64)}, None),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str | None) -> None:
    inputs = dict(zip("qkv", tokens(10, dtype=torch.float32), strict=True)) | change
    if message is None:
        inputs["v"] = inputs["v"].long()
        message = "floating"
    with pytest.raises(ValueError, match=message):
        causal_linear_attention(*inputs.values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"normalize": "rows"}, ValueError, "normalize must be"),
        ({"feature_map": "elu"}, ValueError, "one of identity, elu_plus_one"),
        ({"backend": "cuda"}, ValueError, "one of triton, recurrent, parallel, chunked, plain, ref"),
        ({"backend": "recurrent"}, NotImplementedError, "recurrent: takes one token at a time"),
        ({"key_mask": torch.ones(2, 1, 10)}, ValueError, "boolean"),
        ({"key_mask": torch.ones(2, 1, 9, dtype=torch.bool)}, ValueError, r"key_mask must be \(..., 10\)"),
        ({"log_decay": torch.zeros(2, 3, 4)}, ValueError, r"log_decay must be \(..., 10\)"),
        ({"state": LinearState(torch.zeros(5, 4), torch.zeros(5))}, ValueError, "the state must have S"),
        ({"state": LinearState(torch.zeros(5, 3).bfloat16(), torch.zeros(5))}, ValueError, "must be torch.float32"),
        ({"scale": 1.0}, TypeError, "scale"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        causal_linear_attention(*tokens(10, dtype=torch.float32), **options)
