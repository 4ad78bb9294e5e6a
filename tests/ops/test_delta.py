"""The laws of `causal_delta_attention`, over its backends and its decays: none, per head and token, per channel; and
per channel with removal keys."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from linattn.ops import causal_delta_attention, explain_backend, packed_log_decay
from linattn.ops.fast import blocks
from tests import laws
from tests.laws import LENGTHS
from tests.recurrence import relative

D, DV = 5, 3

every_backend = pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent", "plain"])
every_decay = pytest.mark.parametrize("decay", [None, "head", "channel", "removal"])
PER_CHANNEL = ("channel", "removal")


def inputs(n: int, decay: str | None = None, lead: tuple[int, ...] = (2, 3), **sizes: Any) -> dict[str, Tensor]:
    """Queries, keys of length 1, values, β in [0, 2], a state, and decays of which some begin a new sequence. Removal
    keys are near the keys, so that states do not grow."""
    d, dv, dtype = sizes.get("d", D), sizes.get("dv", DV), torch.float64
    found = {
        "q": torch.randn(*lead, n, d, dtype=dtype),
        "k": normalize(torch.randn(*lead, n, d, dtype=dtype), dim=-1),
        "v": torch.randn(*lead, n, dv, dtype=dtype),
        "beta": 2 * torch.rand(*lead, n, dtype=dtype),
        "state": torch.randn(*lead, d, dv, dtype=dtype),
    }
    if decay:
        log_decay = -torch.rand(*lead, n, *([d] if decay in PER_CHANNEL else []), dtype=dtype)
        found["log_decay"] = log_decay.masked_fill(torch.rand(log_decay.shape) < 0.03, -torch.inf)
    if decay == "removal":
        found["removal_key"] = normalize(found["k"] + 0.3 * torch.randn_like(found["k"]), dim=-1)
    return found


def run(*, backend: str, state: Tensor | None = None, **given: Tensor) -> tuple[Tensor, Tensor]:
    """Run the backend; the recurrent one is given token after token."""
    if backend != "recurrent":
        return call(given, state, backend=backend)
    nothing, state = call(part(given, 0, 0), state, backend="reference")
    ys = [nothing]
    for i in range(given["q"].shape[-2]):
        y, state = call(part(given, i, i + 1), state, backend=backend)
        ys.append(y)
    return torch.cat(ys, -2), state


def call(given: dict[str, Tensor], state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    q, k, v, beta = (given[name] for name in ("q", "k", "v", "beta"))
    masks = {name: given[name] for name in ("log_decay", "key_mask", "removal_key") if name in given}
    return causal_delta_attention(q, k, v, beta, given.get("state") if state is None else state, **masks, **options)


def part(given: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Cut the tokens of all tensors, whose number is that of the queries."""
    n, cut = given["q"].shape[-2], {}
    for name, x in given.items():
        per_token = name in ("beta", "key_mask") or (name == "log_decay" and x.shape[-1] == n and x.ndim < 4)
        cut[name] = x if name == "state" else x[..., start:stop] if per_token else x[..., start:stop, :]
    return cut


def attention(backend: str, decay: str | None) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        given = {"q": q, "k": normalize(k, dim=-1), "v": v, "beta": torch.sigmoid(q[..., 0])}
        if decay:
            given["log_decay"] = -q[..., 0].exp() if decay == "head" else -q.exp()
        if decay == "removal":
            given["removal_key"] = normalize(k + v.mean(-1, keepdim=True), dim=-1)
        if key_mask is not None:
            given["key_mask"] = key_mask
        return run(backend=backend, **given)[0]

    return attend


def everything(given: dict[str, Tensor], upstream: tuple[Tensor, ...], **options: Any) -> dict[str, Tensor]:
    """Outputs, state and gradients of all that has one."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x.is_floating_point()}
    results = run(**(given | leaves), **options)
    of_results = [x.to(y.dtype) for x, y in zip(upstream, results, strict=True)]
    wanted = list(leaves.values())
    gradients = torch.autograd.grad(results, wanted, of_results, allow_unused=True, materialize_grads=True)
    return dict(zip(("y", "S", *leaves), (*results, *gradients), strict=True))


def upstream_of(given: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    y, S = run(**given, backend="reference", **options)
    return torch.randn_like(y), torch.randn_like(S)


def assert_same(given: dict[str, Tensor], other: dict[str, Tensor], **to: Any) -> None:
    for name, x in given.items():
        assert_close(x, other[name], msg=lambda message, name=name: f"{name}: {message}", **to)


@every_backend
@every_decay
def test_agrees_with_the_formula(backend: str, decay: str | None) -> None:
    given = inputs(20, decay, lead=())
    S, eye = given["state"], torch.eye(D, dtype=torch.float64)
    log_decay = given.get("log_decay", torch.zeros(20, dtype=torch.float64)).view(20, -1).expand(-1, D)
    y, last = run(**given, backend=backend)
    for t in range(20):
        k, v, beta, removal = given["k"][t], given["v"][t], given["beta"][t], given.get("removal_key", given["k"])[t]
        S = (eye - beta * torch.outer(k, removal)) @ torch.diag(log_decay[t].exp()) @ S + beta * torch.outer(k, v)
        assert_close(y[t], S.mT @ given["q"][t])
    assert_close(last, S)


@pytest.mark.parametrize("backend", ["chunked", "recurrent", "plain"])
@every_decay
@pytest.mark.parametrize("n", LENGTHS)
def test_outputs_states_and_gradients_agree_with_the_definition(backend: str, decay: str | None, n: int) -> None:
    given = inputs(min(n, 100) if backend == "recurrent" else n, decay)
    if n > 1:
        given["key_mask"] = laws.masks(given["q"].shape[-2])["holes"]
    upstream = upstream_of(given)
    expected = everything(given, upstream, backend="reference")
    assert_same(everything(given, upstream, backend=backend), expected, rtol=1e-9, atol=1e-9)


@every_decay
def test_segments_make_the_whole(decay: str | None) -> None:
    """Several segments and a rest: one holds 256 tokens here."""
    given = inputs(600, decay, lead=(4,), d=blocks.BLOCK // 1024, dv=4)
    upstream = upstream_of(given)
    expected = everything(given, upstream, backend="reference")
    assert_same(everything(given, upstream, backend="chunked"), expected, rtol=1e-9, atol=1e-9)


@every_decay
@pytest.mark.parametrize("shared", [False, True])
def test_rows_make_the_batch(monkeypatch: pytest.MonkeyPatch, decay: str | None, shared: bool) -> None:
    """Where the states of all rows do not fit the cache, rows follow one another, each in segments of 64 tokens."""
    monkeypatch.setattr(blocks, "BLOCK", 1)
    given = inputs(150, decay, lead=(3, 2))
    if shared:
        given |= {name: x[:, :1] for name, x in given.items() if name != "q"}
    upstream = upstream_of(given)
    expected = everything(given, upstream, backend="reference")
    assert_same(everything(given, upstream, backend="chunked"), expected, rtol=1e-9, atol=1e-9)


@every_backend
@every_decay
@pytest.mark.parametrize("cuts", [(1, 2, 3), (63, 64, 65)])
def test_pieces_make_the_whole(backend: str, decay: str | None, cuts: tuple[int, ...]) -> None:
    n = 130
    given = inputs(n, decay) | {"key_mask": laws.masks(n)["holes"]}
    state = given.pop("state")
    whole, end = run(**given, state=state, backend=backend)
    ys = []
    for start, stop in itertools.pairwise((0, *cuts, n)):
        y, state = run(**part(given, start, stop), state=state, backend=backend)
        ys.append(y)
    assert_close(torch.cat(ys, -2), whole)
    assert_close(state, end)


@every_backend
@every_decay
def test_the_past_does_not_see_the_future(backend: str, decay: str | None) -> None:
    q, k, v = (inputs(100)[name] for name in "qkv")
    attend = attention(backend, decay)
    for at in (1, 60, 64, 90):
        laws.the_past_does_not_see_the_future(attend, q, k, v, at)


@every_backend
@pytest.mark.parametrize("decay", ["head", "channel", "removal"])
@pytest.mark.parametrize("heads", [slice(0, 1), slice(0, 3)])
def test_the_past_does_not_see_strong_decays_of_the_future(backend: str, decay: str, heads: slice) -> None:
    """To the last bit, where the others are weak: those of one head, or of all."""
    given = inputs(100, decay)
    given["log_decay"] = -torch.rand_like(given["log_decay"])
    before, _ = run(**given, backend=backend)
    for at in (1, 21, 60, 64):
        later = given["log_decay"].clone()
        later[:, heads, at] = -30
        after, _ = run(**given | {"log_decay": later}, backend=backend)
        assert_close(after[..., :at, :], before[..., :at, :], rtol=0, atol=0)
        assert not torch.equal(after[:, heads, at:], before[:, heads, at:])


@pytest.mark.parametrize("at", [1, 40, 69])
def test_a_strong_decay_of_one_head(at: int) -> None:
    given = inputs(70, "channel")
    given["log_decay"] = -torch.rand_like(given["log_decay"])
    given["log_decay"][0, 1, at, 2] = -30
    upstream = upstream_of(given)
    assert_same(everything(given, upstream, backend="chunked"), everything(given, upstream, backend="reference"))


@every_backend
@every_decay
@pytest.mark.parametrize("kind", ["left", "holes", "all"])
def test_a_masked_token_neither_writes_nor_decays(backend: str, decay: str | None, kind: str) -> None:
    for n in (1, 65, 100):
        q, k, v = (inputs(n)[name] for name in "qkv")
        laws.a_masked_key_is_a_missing_key(attention(backend, decay), q, k, v, laws.masks(n)[kind])
        given = inputs(n, decay) | {"key_mask": torch.zeros(2, 1, n, dtype=torch.bool)}
        assert_close(run(**given, backend=backend)[1], given["state"], rtol=0, atol=0)


@every_backend
@every_decay
@pytest.mark.parametrize("rubbish", [torch.inf, torch.nan])
def test_a_masked_token_has_no_effect_on_gradients(backend: str, decay: str | None, rubbish: float) -> None:
    given = inputs(70, decay)
    mask = laws.masks(70)["holes"].expand(2, 3, 70)
    upstream = upstream_of(given | {"key_mask": mask})
    clean = everything(given | {"key_mask": mask}, upstream, backend=backend)
    for name in given.keys() - {"state", "q"}:
        absent = ~mask if given[name].ndim == 3 else ~mask.unsqueeze(-1)
        given[name] = given[name].masked_fill(absent, rubbish)
    assert_same(everything(given | {"key_mask": mask}, upstream, backend=backend), clean)


@every_backend
@every_decay
def test_packed_sequences_do_not_see_each_other(backend: str, decay: str | None) -> None:
    lengths = (0, 1, 64, 5, 0, 60)
    n, ends = sum(lengths), torch.tensor([0, *itertools.accumulate(lengths)])
    given = {name: x for name, x in inputs(n, decay).items() if name != "state"}
    begins = packed_log_decay(ends, n).double()
    own = given.get("log_decay", torch.zeros(2, 3, n, dtype=torch.float64))
    packed = own + (begins.unsqueeze(-1) if decay in PER_CHANNEL else begins)
    y, S = upstream_of(given)
    together = everything(given | {"log_decay": packed}, (y, 0 * S), backend=backend)
    for start, stop in itertools.pairwise(ends.tolist()):
        alone = everything(part(given, start, stop), (y[..., start:stop, :], 0 * S), backend="chunked")
        for name in ("y", "q", "k", "v", *given.keys() & {"removal_key"}):
            assert_close(together[name][..., start:stop, :], alone[name])
        assert_close(together["beta"][..., start:stop], alone["beta"])


@every_backend
@every_decay
@pytest.mark.parametrize("fewer", ["q", "v", "k v beta log_decay state removal_key", "k beta state", "removal_key"])
def test_fewer_heads_are_shared(backend: str, decay: str | None, fewer: str) -> None:
    given = inputs(70, decay)
    for name in fewer.split():
        if name in given:
            given[name] = given[name][:, :1]
    spread = {name: x.expand(2, 3, *x.shape[2:]) for name, x in given.items()}
    y, S = run(**given, backend=backend)
    y_spread, S_spread = run(**spread, backend="reference")
    assert_close(y, y_spread)
    assert_close(S.expand(S_spread.shape), S_spread)
    upstream = torch.randn_like(y), torch.randn_like(S)
    expected = everything(given, upstream, backend="reference")
    assert_same(everything(given, upstream, backend=backend), expected)


@every_backend
@every_decay
@pytest.mark.parametrize("batch", [1, 2])
def test_permuted_and_strided_inputs(backend: str, decay: str | None, batch: int) -> None:
    """A layout of (batch, tokens, heads, channels) gives the same numbers; with one batch element too."""
    given = inputs(70, decay, lead=(batch, 3))
    upstream = upstream_of(given)
    permuted = {name: torch.stack([x, x], -1).transpose(1, 2).contiguous() for name, x in given.items()}
    permuted = {name: x.transpose(1, 2)[..., 0] for name, x in permuted.items()}
    assert not permuted["q"].is_contiguous()
    ours, theirs = (everything(x, upstream, backend=backend) for x in (permuted, given))
    assert_same(ours, theirs)
    ours = everything(permuted, tuple(x.mT.contiguous().mT for x in upstream), backend=backend)
    assert_same(ours, theirs)


@every_backend
@pytest.mark.parametrize("decay", ["head", "channel", "removal"])
@pytest.mark.parametrize("strength", [-1e-3, -5.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_strength_of_decay(backend: str, decay: str, strength: float, dtype: torch.dtype) -> None:
    """Compared in float64. The gradients of decays count by themselves: those of strong ones are small."""
    given = inputs(100, decay)
    given["log_decay"] = strength * torch.rand_like(given["log_decay"])
    given["log_decay"][..., 50:60, :] = strength
    upstream = upstream_of(given)
    exact = everything(given, upstream, backend="reference")
    ours = everything({name: x.to(dtype) for name, x in given.items()}, upstream, backend=backend)
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    for name, x in exact.items():
        assert (ours[name].double() - x).norm() <= bound * x.norm() + 1e-30, name


@every_backend
@pytest.mark.parametrize("decay", ["head", "channel", "removal"])
@pytest.mark.parametrize("strength", [-2.6, -5.7, -13.0, -40.0])
def test_gradients_of_decays_that_are_all_strong(backend: str, decay: str, strength: float) -> None:
    """In float32 beside float64: each gradient is as small as its decay, and must not be what rounding leaves of larger
    sums."""
    given = inputs(70, decay)
    given["log_decay"] = torch.full_like(given["log_decay"], strength)
    upstream = upstream_of(given)
    exact = everything(given, upstream, backend="reference")
    ours = everything({name: x.float() for name, x in given.items()}, upstream, backend=backend)
    for name, x in exact.items():
        assert (ours[name].double() - x).norm() <= 1e-4 * x.norm() + 1e-30, name


@every_backend
@every_decay
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
def test_values_near_the_ends_of_the_range_of_float32(backend: str, decay: str | None, scale: float) -> None:
    given = inputs(70, decay)
    if decay:
        given["log_decay"] = -4 * torch.rand_like(given["log_decay"])
    given |= {name: scale * given[name] for name in ("v", "state")}
    upstream = upstream_of(given)
    exact = everything(given, upstream, backend="reference")
    ours = everything({name: x.float() for name, x in given.items()}, upstream, backend=backend)
    for name, x in exact.items():
        assert (ours[name].double() - x).norm() <= 1e-4 * x.norm(), name


@every_backend
@every_decay
def test_a_key_that_repeats_reads_what_was_written_last(backend: str, decay: str | None) -> None:
    """Write, overwrite, read; in float32, where powers of the similarities of the keys would overflow."""
    given = inputs(200, decay)
    given |= {"k": given["k"][..., :1, :].expand(2, 3, 200, D), "beta": torch.ones(2, 3, 200)}
    given |= {name: given["k"] for name in given.keys() & {"removal_key"}}
    given = {name: x.float() for name, x in given.items()}
    y, S = run(**given | {"q": given["k"]}, backend=backend)
    assert_close(y, given["v"], rtol=1e-5, atol=1e-5)
    assert_close(given["k"][..., -1:, :] @ S, given["v"][..., -1:, :], rtol=1e-5, atol=1e-5)


@every_backend
def test_beta_of_zero_changes_nothing(backend: str) -> None:
    given = inputs(70)
    given["beta"] = torch.zeros_like(given["beta"])
    y, S = run(**given, backend=backend)
    assert_close(S, given["state"], rtol=0, atol=0)
    assert_close(y, given["q"] @ given["state"])


@every_backend
def test_orthogonal_keys_are_all_remembered(backend: str) -> None:
    given = inputs(64, d=64)
    given |= {"k": torch.eye(64, dtype=torch.float64).expand(2, 3, 64, 64), "beta": torch.ones(2, 3, 64).double()}
    _, S = run(**given, backend=backend)
    assert_close(S, given["v"])


@every_backend
def test_beta_of_two_counts(backend: str) -> None:
    """A step with β = 2 mirrors the state: its sign is the parity of the bits so far."""
    bits = torch.rand(2, 150) < 0.5
    one = torch.ones(2, 150, 1, dtype=torch.float64)
    start = torch.ones(2, 1, 1, dtype=torch.float64)
    given = {"q": one, "k": one, "v": 0 * one, "beta": 2.0 * bits.double(), "state": start}
    y, _ = run(**given, backend=backend)
    assert torch.equal(y[..., 0], 1 - 2.0 * (bits.cumsum(-1) % 2))


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@every_decay
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_low_precision_is_near_float64(backend: str, decay: str | None, mean: float) -> None:
    """On the same rounded inputs: outputs, states and all gradients, with values that have a mean too."""
    given = inputs(100 if backend == "recurrent" else 700, decay, d=16, dv=8)
    given["v"] += mean
    given = {name: (x / 1.01 if name in ("k", "removal_key") else x).bfloat16().double() for name, x in given.items()}
    upstream = tuple(x.bfloat16().double() for x in upstream_of(given))
    exact = everything(given, upstream, backend="reference")
    for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)):
        low = {name: x if name == "state" else x.to(dtype) for name, x in given.items()}
        low["state"] = low["state"].float()
        ours = everything(low, upstream, backend=backend)
        assert ours["y"].dtype == dtype and ours["S"].dtype == torch.float32
        errors = {name: relative(ours[name], exact[name]) for name in exact}
        assert max(errors.values()) <= bound, (dtype, errors)


@every_decay
@pytest.mark.parametrize("n", [1, 4])
def test_derivatives_of_any_order(decay: str | None, n: int) -> None:
    given = inputs(n, decay, lead=(1,), d=3, dv=2)
    if decay:
        given["log_decay"] = -0.1 - torch.rand_like(given["log_decay"])
    tensors = [x.requires_grad_() for x in given.values()]

    def attend(*x: Tensor) -> tuple[Tensor, ...]:
        return call(dict(zip(given, x, strict=True)), backend="chunked")

    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)


@every_decay
@pytest.mark.parametrize("n", [1, 70])
def test_vmap_of_gradients_is_a_loop(decay: str | None, n: int) -> None:
    given = inputs(n, decay)

    def loss(*x: Tensor) -> Tensor:
        y, S = call(dict(zip(given, x, strict=True)))
        return y.square().sum() + S.sum()

    gradient = torch.func.grad(loss, argnums=tuple(range(len(given))))
    together = torch.func.vmap(gradient)(*given.values())
    apart = zip(*(gradient(*(x[i] for x in given.values())) for i in range(2)), strict=True)
    assert_close(together, tuple(torch.stack(g) for g in apart))


@every_decay
def test_autocast_does_not_round_the_states(decay: str | None) -> None:
    given = {name: x.float() for name, x in inputs(70, decay).items()}
    upstream = upstream_of(given)
    for backend in ("reference", "chunked"):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = run(**leaves, backend=backend)
        mixed = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), upstream), strict=True))
        assert_same(mixed, everything(given, upstream, backend=backend))


@every_backend
@every_decay
@pytest.mark.parametrize("lead", [(0, 3), (2, 0)])
def test_no_rows(backend: str, decay: str | None, lead: tuple[int, ...]) -> None:
    given = inputs(70, decay, lead=lead)
    found = everything(given, upstream_of(given), backend=backend)
    assert all(found[name].shape == x.shape for name, x in given.items())


@every_backend
@every_decay
def test_scale_is_a_factor_of_queries(backend: str, decay: str | None) -> None:
    given = {name: x.requires_grad_() for name, x in inputs(1 if backend == "recurrent" else 70, decay).items()}
    scaled, expected = call(given, backend=backend, scale=0.3), call(given | {"q": 0.3 * given["q"]}, backend=backend)
    upstream, leaves = [torch.randn_like(x) for x in scaled], list(given.values())
    assert_close(scaled, expected)
    assert_close(torch.autograd.grad(scaled, leaves, upstream), torch.autograd.grad(expected, leaves, upstream))


@every_backend
def test_queries_in_half_precision_are_scaled_in_float32(backend: str) -> None:
    given = {name: x.bfloat16() for name, x in inputs(1 if backend == "recurrent" else 70).items()}
    given["state"] = given["state"].float()
    y, _ = call(given, backend=backend, scale=0.3)
    exact, _ = call({name: x.float() for name, x in given.items()}, backend=backend, scale=0.3)
    assert torch.equal(y, exact.bfloat16())


def test_inputs_are_not_modified() -> None:
    given = inputs(70, "removal") | {"key_mask": laws.masks(70)["holes"]}
    copies = {name: x.clone() for name, x in given.items()}
    upstream = upstream_of(given)
    for backend in ("reference", "chunked"):
        everything(given, upstream, backend=backend)
        assert all(torch.equal(x, copies[name]) for name, x in given.items())


def test_memory_saved_for_the_backward_is_linear_in_the_length() -> None:
    """The inputs, a state per segment, the corrected values, and the matrices of each chunk, [P, A, M]."""
    given = {name: x.requires_grad_() for name, x in inputs(3000, lead=(1, 4), d=64, dv=32).items()}
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call(given, backend="chunked")
    others = [x for x in saved if not any(x.data_ptr() == y.data_ptr() for y in given.values())]
    assert [tuple(x.shape) for x in others] == [(4, 4, 64, 32), (188, 4, 16, 32), (188, 4, 3, 16, 16)]


def test_a_backend_is_chosen_and_explained() -> None:
    one, many = inputs(1, "channel"), inputs(9)
    kernels = "triton: has no kernels for the delta rule; on a GPU too it runs as matrix products of torch\n"
    assert explain(one).startswith(kernels + "recurrent: runs this call\n")
    assert explain(many) == (
        kernels + "recurrent: takes one token at a time, but q is (2, 3, 9, 5)\n"
        "chunked: runs this call\n"
        "plain: can run it, when named\n"
        "reference: can run it, when named"
    )
    with pytest.raises(NotImplementedError, match="recurrent: takes one token"):
        call(many, backend="recurrent")
    with pytest.raises(NotImplementedError, match="triton: has no kernels for the delta rule"):
        call(many, backend="triton")
    with pytest.raises(ValueError, match="did you mean 'chunked'"):
        call(many, backend="chunk")
    with pytest.raises(ValueError, match="the delta rule, which is causal"):
        explain(many, is_causal=False)


def explain(given: dict[str, Tensor], **options: Any) -> str:
    named = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    return explain_backend(given["q"], given["k"], given["v"], **named, **options)


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_are_refused() -> None:
    given = inputs(9, "channel")
    wrong = {
        "log_decay": (given["log_decay"][..., :4], r"log_decay must be \(..., 9\) or \(..., 9, 5\)"),
        "beta": (given["beta"][..., :4], r"beta must be \(..., 9\)"),
        "state": (given["state"].mT, r"the state must be \(..., 5, 3\) of torch.float64"),
        "v": (given["v"][..., :4, :], "every key must have a value"),
        "q": (given["q"][..., :4, :], "a query for every key"),
        "removal_key": (given["k"][..., :4, :], r"removal_key must be .*, as k is \(2, 3, 9, 5\)"),
    }
    for name, (x, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(given | {name: x})
    parts: Any = (given["state"],)
    with pytest.raises(ValueError, match="state must be a tensor"):
        call(given | {"state": parts})
    for beta in (given["beta"].long(), given["beta"] > 1):
        with pytest.raises(ValueError, match="beta must be floating-point"):
            call(given | {"beta": beta})
    with pytest.raises(ValueError, match="must not be positive"):
        call(given | {"log_decay": -given["log_decay"]})
    for scale in ("x", True, None, torch.tensor(0.5)):
        with pytest.raises(ValueError, match="scale must be a number, but is "):
            call(given, scale=scale)
    with pytest.raises(ValueError, match="leading dimensions must broadcast"):
        call(given | {"k": given["k"][:, :2]})


@every_backend
@every_decay
def test_a_state_keeps_no_other_memory_alive(backend: str, decay: str | None) -> None:
    _, state = run(**inputs(100, decay), backend=backend)
    assert state.untyped_storage().nbytes() == state.nbytes


@every_backend
@every_decay
def test_a_nan_does_not_reach_earlier_tokens(backend: str, decay: str | None) -> None:
    given, at = inputs(100, decay), 71
    expected, _ = run(**given, backend=backend)
    # a log decay of infinity is refused
    for name, number in itertools.product(given.keys() - {"state", "log_decay"}, (torch.nan, torch.inf)):
        broken = given[name].clone()
        broken[1, 2, at] = number
        y, _ = run(**(given | {name: broken}), backend=backend)
        assert_close(y[..., :at, :], expected[..., :at, :])
        assert_close(y[0], expected[0])
