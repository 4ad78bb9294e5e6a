"""The laws of the causal kernels, against the definition in float64."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import ELEMENTWISE, LinearState, causal_linear_attention, packed_log_decay
from tests import laws

TRITON: dict[str, Any] = {"backend": "triton"}


@pytest.fixture
def splits(in_splits: Callable[[int], None]) -> None:
    in_splits(64)


def tokens(
    n: int, device: torch.device, f: int = 5, dv: int = 3, dtype: torch.dtype = torch.float32, lead: Any = (2, 1)
) -> list[Tensor]:
    """Queries and keys that serve as features, and values."""
    q, k, v = torch.rand(*lead, n, f), torch.rand(*lead, n, f), torch.randn(*lead, n, dv)
    return [x.to(device, dtype) for x in (q, k, v)]


def decays(n: int, device: torch.device, lead: Any = (2, 1)) -> Tensor:
    log_decay = -torch.rand(*lead, n)
    log_decay[torch.rand(*lead, n) < 0.05] = -torch.inf
    return log_decay.to(device)


def holes(n: int, device: torch.device) -> Tensor:
    return (torch.rand(2, 1, n) < 0.7).to(device)


def compare(
    leaves: list[Tensor], tolerance: float, *, key_mask: Tensor | None = None, decayed: bool = False, **options: Any
) -> None:
    """Outputs, states and all gradients, of q, k, v, S, z and perhaps log_decay: the error's norm, over the norm."""
    results = []
    noise: list[Tensor] = []
    for backend, dtype in (("triton", None), ("reference", torch.float64)):
        mine = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
        q, k, v, S, z = mine[:5]
        log_decay = mine[5] if decayed else None
        y, state = causal_linear_attention(
            q, k, v, LinearState(S, z), log_decay=log_decay, key_mask=key_mask, backend=backend, **options
        )
        outputs = [y, state.S, state.z]
        noise = noise or [torch.randn_like(x) for x in outputs]
        upstream = [x.to(y.dtype) for x, y in zip(noise, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, mine, upstream, materialize_grads=True, allow_unused=True)
        results.append([*outputs, *gradients])
    names = ["y", "S", "z", "dq", "dk", "dv", "dS", "dz", "dlog_decay"]
    for name, ours, exact in zip(names, *results, strict=False):
        error = (ours.double() - exact).norm()
        assert error <= tolerance * exact.norm() + 1e-5, f"{name}: {error / exact.norm()}"


def state(device: torch.device, f: int = 5, dv: int = 3, lead: Any = (2, 1)) -> list[Tensor]:
    return [torch.randn(*lead, f, dv).to(device), (torch.rand(*lead, f) + 1).to(device)]


@pytest.mark.parametrize(
    ("n", "normalize"),
    [*((n, "output") for n in (0, 1, 2, 63, 64, 65, 130)), (0, None), (1, None), (2, None), (65, None)],
)
def test_outputs_states_and_gradients_agree_with_the_definition(
    n: int, normalize: str | None, device: torch.device
) -> None:
    leaves = [*tokens(n, device), *state(device), decays(n, device)]
    compare(leaves, 1e-5, key_mask=holes(n, device), decayed=True, normalize=normalize)


@pytest.mark.parametrize("normalize", ["output", None])
def test_without_mask_and_decay_too(normalize: str | None, device: torch.device) -> None:
    compare([*tokens(70, device), *state(device)], 1e-5, normalize=normalize, feature_map="elu_plus_one")


@pytest.mark.parametrize("feature_map", ELEMENTWISE)
def test_every_map(feature_map: str, device: torch.device) -> None:
    q, k, v = tokens(20, device)
    compare([4 * q - 2, 4 * k - 2, v, *state(device)], 2e-5, normalize=None, feature_map=feature_map)


@pytest.mark.parametrize(
    ("f", "dv", "dtype"),
    [
        (1, 1, torch.float32),
        (17, 33, torch.float32),
        (100, 24, torch.float32),
        (24, 100, torch.bfloat16),
        (130, 40, torch.float16),
    ],
)
def test_every_width(f: int, dv: int, dtype: torch.dtype, device: torch.device) -> None:
    n = 35 if f * dv < 10_000 or device.type == "cuda" else 2
    leaves = [*tokens(n, device, f, dv, dtype, lead=(1, 1)), *state(device, f, dv, lead=(1, 1))]
    compare(leaves, max(1e-5, 2 * torch.finfo(dtype).eps))


@pytest.mark.usefixtures("splits")
def test_a_sequence_in_splits(device: torch.device) -> None:
    leaves = [*tokens(129, device), *state(device), decays(129, device)]
    compare(leaves, 1e-5, key_mask=holes(129, device), decayed=True)


@pytest.mark.usefixtures("splits")
def test_splits_of_rows_that_share_keys(device: torch.device) -> None:
    q = tokens(70, device, lead=(1, 2))[0]
    _, k, v = tokens(70, device, lead=(1, 1))
    compare([q, k, v, *state(device, lead=(1, 1)), decays(70, device, lead=(1, 1))], 1e-5, decayed=True, normalize=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", ["output", None])
def test_every_dtype_is_close_to_float64(dtype: torch.dtype, normalize: str | None, device: torch.device) -> None:
    """What differs is the rounding of inputs, outputs, features and weights."""
    q, k, v = (x.to(dtype) for x in torch.randn(3, 70, 16, device=device))
    options = {"normalize": normalize, "feature_map": "elu_plus_one"}
    y, _ = causal_linear_attention(q, k, v, backend="triton", **options)
    exact, _ = causal_linear_attention(q.double(), k.double(), v.double(), backend="reference", **options)
    unit = max(torch.finfo(dtype).eps, 1e-5)
    assert y.dtype == dtype
    assert (y.double() - exact).abs().max() <= unit * exact.abs().max()
    compare([q, k, v, *state(device, 16, 16, lead=())], 2 * unit, **options)


def test_float16_leaves_its_range_inside_and_comes_back(device: torch.device) -> None:
    """Sums over 200 tokens of products of 60² · 16: far above 65504, where float16 ends."""
    q, k, v = (60 * torch.rand(200, 16) + 10).half(), (60 * torch.rand(200, 16) + 10).half(), torch.randn(200, 16)
    leaves = [x.to(device) for x in (q, k, v.half())]
    compare([*leaves, *(0 * x for x in state(device, 16, 16, lead=()))], 4e-3)


def test_bfloat16_decoding_stays_with_the_float64_run(device: torch.device) -> None:
    steps = 4000 if device.type == "cuda" else 40
    q, k, v = (x.bfloat16() for x in torch.randn(3, 2, steps, 8, device=device))
    after, ys = None, []
    for i in range(steps):
        one = (x[:, i : i + 1] for x in (q, k, v))
        y, after = causal_linear_attention(*one, after, feature_map="elu_plus_one", backend="triton")
        ys.append(y)
    exact, _ = causal_linear_attention(*(x.double() for x in (q, k, v)), feature_map="elu_plus_one", backend="chunked")
    error = (torch.cat(ys, 1).double() - exact).abs()
    assert error[:, -20:].max() <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.parametrize("normalize", ["output", None])
@pytest.mark.parametrize("cuts", [(1, 2, 40), (39,), (16, 17, 32, 33)])
def test_pieces_make_the_whole(cuts: tuple[int, ...], normalize: str | None, device: torch.device) -> None:
    q, k, v = tokens(50, device)
    log_decay, mask = decays(50, device), holes(50, device)
    options = {"normalize": normalize, **TRITON}
    whole, end = causal_linear_attention(q, k, v, log_decay=log_decay, key_mask=mask, **options)
    ys, after = [], None
    for start, stop in itertools.pairwise((0, *cuts, 50)):
        part = [x[..., start:stop, :] for x in (q, k, v)]
        here = {"log_decay": log_decay[..., start:stop], "key_mask": mask[..., start:stop]}
        y, after = causal_linear_attention(*part, after, **here, **options)
        ys.append(y)
    assert after is not None
    assert_close(torch.cat(ys, -2), whole, rtol=1e-4, atol=1e-5)
    assert_close(after[:2], end[:2], rtol=1e-4, atol=1e-5)


def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    return causal_linear_attention(q, k, v, key_mask=key_mask, **TRITON)[0]


@pytest.mark.parametrize("at", [1, 32, 40])
def test_the_past_does_not_see_the_future(at: int, device: torch.device) -> None:
    laws.the_past_does_not_see_the_future(attend, *tokens(70, device), at)


@pytest.mark.parametrize("rubbish", [torch.inf, torch.nan])
def test_not_even_an_infinite_future(rubbish: float, device: torch.device) -> None:
    q, k, v = tokens(70, device)
    before = attend(q, k, v)
    k[..., 40:, :] = rubbish
    assert_close(attend(q, k, v)[..., :40, :], before[..., :40, :], rtol=0, atol=0)


def test_the_last_token_sees_everything(device: torch.device) -> None:
    laws.the_last_token_sees_everything(attend, *tokens(65, device))


@pytest.mark.parametrize("kind", ["left", "right", "holes", "all"])
def test_a_masked_key_is_a_missing_key(kind: str, device: torch.device) -> None:
    key_mask = laws.masks(45)[kind].to(device)
    laws.a_masked_key_is_a_missing_key(attend, *tokens(45, device), key_mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_features_may_be_scaled(scale: float, device: torch.device) -> None:
    q, k, v = tokens(40, device)
    assert_close(attend(q, scale * k, v), attend(q, k, v), rtol=1e-4, atol=1e-5)
    laws.constant_values_come_back(attend, q, scale * k, v, rtol=1e-5, atol=1e-5)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    laws.constant_values_come_back(attend, q, k, v, rtol=1e-2, atol=0)


def test_a_denominator_near_the_end_of_float32_is_none(device: torch.device) -> None:
    q, k, v = tokens(20, device)
    q, k, v = (x.requires_grad_() for x in (1e-20 * q, 1e-20 * k, v))
    y = attend(q, k, v)
    assert torch.equal(y, torch.zeros_like(y))
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient(device: torch.device) -> None:
    q, k, v = (x.requires_grad_() for x in tokens(40, device))
    hidden = torch.arange(40, device=device) > 20
    y, _ = causal_linear_attention(q, k, v, key_mask=hidden, **TRITON)
    assert torch.equal(y[..., :21, :], torch.zeros_like(y[..., :21, :]))
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert not gradients[0][..., :21, :].any() and not gradients[2][..., :21, :].any()


def test_an_infinite_decay_begins_a_new_sequence(device: torch.device) -> None:
    q, k, v = tokens(75, device)
    log_decay = -torch.rand(2, 1, 75).to(device)
    starts = (0, 1, 40, 64)
    log_decay[..., starts] = -torch.inf
    y, _ = causal_linear_attention(q, k, v, log_decay=log_decay, **TRITON)
    for start, stop in itertools.pairwise((*starts, 75)):
        part = (x[..., start:stop, :] for x in (q, k, v))
        alone, _ = causal_linear_attention(*part, log_decay=log_decay[..., start:stop], **TRITON)
        assert_close(y[..., start:stop, :], alone, rtol=1e-4, atol=1e-5)


def test_packed_sequences(device: torch.device) -> None:
    """Of 0, 1, 40 and 34 tokens, in one row each."""
    q, k, v = tokens(75, device)
    ends = torch.tensor([0, 0, 1, 41, 75], device=device, dtype=torch.int32)
    y, _ = causal_linear_attention(q, k, v, log_decay=packed_log_decay(ends, 75), **TRITON)
    for start, stop in ((0, 1), (1, 41), (41, 75)):
        alone, _ = causal_linear_attention(*(x[..., start:stop, :] for x in (q, k, v)), **TRITON)
        assert_close(y[..., start:stop, :], alone, rtol=1e-4, atol=1e-5)


def test_a_long_steep_decay_stays_exact(device: torch.device) -> None:
    q, k, v = tokens(100, device)
    log_decay = torch.full((100,), -0.01, device=device)
    log_decay[::3] = -1000
    y, _ = causal_linear_attention(q, k, v, log_decay=log_decay, **TRITON)
    exact, _ = causal_linear_attention(
        *(x.double() for x in (q, k, v)), log_decay=log_decay.double(), backend="reference"
    )
    assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)


def test_grouped_queries_share_a_key_head(device: torch.device) -> None:
    q, k, v = tokens(40, device, lead=(1, 2, 3))[0], *tokens(40, device, lead=(1, 2, 1))[1:]
    _, after = causal_linear_attention(q, k, v, **TRITON)
    assert after.S.shape == (1, 2, 1, 5, 3)
    compare([q, k, v, *state(device, lead=(1, 2, 1))], 1e-5)
    one = [x[..., :1, :] for x in (q, k, v)]
    step, _ = causal_linear_attention(*one, after, **TRITON)
    exact, _ = causal_linear_attention(*one, after, backend="recurrent")
    assert_close(step, exact, rtol=1e-5, atol=1e-6)


def test_keys_shared_along_the_middle_dimension(device: torch.device) -> None:
    q, (_, k, v) = tokens(10, device, lead=(2, 2, 2))[0], tokens(10, device, lead=(2, 1, 2))
    compare([q, k, v, *state(device, lead=(2, 1, 2))], 1e-5)


def test_a_start_has_no_gradient(device: torch.device) -> None:
    q, k, v = tokens(20, device)
    log_decay = torch.full((2, 1, 20), -0.1, device=device)
    log_decay[..., 7] = -torch.inf
    y, _ = causal_linear_attention(q, k, v, log_decay=log_decay.requires_grad_(), normalize=None, **TRITON)
    (gradient,) = torch.autograd.grad(y.square().sum(), log_decay)
    assert not gradient[..., 7].any() and gradient[..., 8:].all()


@pytest.mark.parametrize("n", [1, 20])
def test_states_with_decays_of_their_own_share_queries_and_keys(n: int, device: torch.device) -> None:
    q, k, _ = tokens(n, device, lead=(2, 1))
    v, decay = tokens(n, device, lead=(2, 3))[2], decays(n, device, lead=(2, 3))
    compare([q, k, v, *state(device, lead=(2, 3)), decay], 1e-5, decayed=True, normalize=None)


@pytest.mark.parametrize("n", [1, 20])
def test_an_empty_batch_of_queries_leaves_the_keys_of_all_to_another_backend(n: int, device: torch.device) -> None:
    """A program computes the state of its queries' keys, and there are no programs without queries."""
    q, k, v = (torch.rand(batch, 2, n, 5, device=device) for batch in (0, 1, 1))
    y, state = causal_linear_attention(q, k, v)
    _, expected = causal_linear_attention(k, k, v, backend="reference")
    assert y.shape == (0, 2, n, 5)
    assert_close(state, expected)
    with pytest.raises(NotImplementedError, match="triton: needs queries for the states"):
        causal_linear_attention(q, k, v, backend="triton")


@pytest.mark.parametrize("lead", [(), (2, 2, 2, 2)])
def test_any_leading_dimensions(lead: tuple[int, ...], device: torch.device) -> None:
    q, k, v = tokens(1, device, lead=lead)
    compare([q, k, v, *state(device, lead=lead)], 1e-5)
    if len(lead) == 4:
        compare([q, k[0], v[0], *state(device, lead=lead[1:])], 1e-5)


def test_strides_as_they_come(device: torch.device) -> None:
    """Heads behind tokens; channels behind tokens; a view of one tensor with all three; an expanded gradient."""
    q, k, v = tokens(20, device, 4, 4, lead=(2, 2))
    expected, _ = causal_linear_attention(q, k, v, **TRITON)
    behind = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    packed = list(torch.stack([q, k, v], -2).unbind(-2))
    for inputs in (behind, [x.mT.contiguous().mT for x in (q, k, v)], packed):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y, _ = causal_linear_attention(*leaves, **TRITON)
        assert_close(y, expected, rtol=1e-5, atol=1e-6)
        y.sum().backward()
        assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in leaves)
    y, _ = causal_linear_attention(*behind, **TRITON)
    assert y.transpose(1, 2).is_contiguous()


def test_inputs_are_not_modified(device: torch.device) -> None:
    laws.inputs_are_not_modified(attend, *tokens(40, device), holes(40, device))
