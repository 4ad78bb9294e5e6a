"""The laws of `causal_linear_attention` where heads share queries and keys, each with a decay of its own."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, explain_backend
from linattn.ops.linear import causal_call
from linattn.ops.operators import CAUSAL, GATED, SHARED
from tests import laws
from tests.ops.test_gated import assert_same, call, everything, part, run
from tests.recurrence import relative

LEADS = {
    "heads": ((2, 1), (2, 3)),
    "batch": ((1, 3), (2, 3)),
    "all": ((1, 1), (2, 3)),
    "groups": ((2, 2, 1), (2, 2, 3)),
}

every_lead = pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS.keys())
every_normalization = pytest.mark.parametrize("normalize", ["output", None])


def inputs(n: int, lead: Any = LEADS["heads"], d: int = 5, dv: int = 3) -> dict[str, Tensor]:
    shared, own = lead
    sizes = {"q": (n, d), "k": (n, d), "v": (n, dv), "S": (d, dv), "z": (d,), "log_decay": (n,)}
    leads = {"q": shared, "k": shared}
    found = {name: torch.rand(*leads.get(name, own), *size, dtype=torch.float64) for name, size in sizes.items()}
    resets = torch.rand(*own, n) < 0.03
    found["log_decay"] = (-found["log_decay"]).masked_fill(resets, -torch.inf)
    return found | {name: torch.randn_like(found[name]) for name in ("v", "S")}


def cut(given: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    log_decay = given["log_decay"][..., start:stop]
    return part({name: x for name, x in given.items() if name != "log_decay"}, start, stop) | {"log_decay": log_decay}


def apart(given: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Let the definition run each head with queries and keys of its own."""
    lead = given["v"].shape[:-2]
    return run(given | {name: given[name].expand(*lead, -1, -1) for name in "qk"}, "reference", **options)


@every_lead
@every_normalization
@pytest.mark.parametrize("n", [2, 64, 65, 200])
def test_outputs_states_and_gradients_agree_with_the_definition(lead: Any, normalize: str | None, n: int) -> None:
    given, options = inputs(n, lead), {"normalize": normalize, "feature_map": "elu_plus_one"}
    for mask in (None, torch.rand(*lead[0], n) < 0.6):
        given |= {} if mask is None else {"key_mask": mask}
        results = apart(given, **options)
        upstream = [torch.randn_like(x) for x in results]
        expected = everything(given, upstream, "reference", **options)
        assert_close([expected["y"], expected["last S"], expected["last z"]], list(results))
        assert_same(everything(given, upstream, "chunked", **options), expected, rtol=1e-9, atol=1e-9)


@every_normalization
def test_blocks_make_the_whole(normalize: str | None) -> None:
    given = inputs(600, ((1,), (8,)), d=4, dv=127)
    upstream = [torch.randn_like(x) for x in apart(given, normalize=normalize)]
    expected = everything(given, upstream, "reference", normalize=normalize)
    assert_same(everything(given, upstream, "chunked", normalize=normalize), expected, rtol=1e-9, atol=1e-9)


@every_normalization
def test_pieces_make_the_whole(normalize: str | None) -> None:
    given = inputs(130) | {"key_mask": laws.masks(130)["holes"]}
    y, *last = run(given, "chunked", normalize=normalize)
    ys, state = [], {name: given[name] for name in "Sz"}
    for start, stop in itertools.pairwise((0, 1, 2, 65, 66, 130)):
        backend = "recurrent" if stop - start == 1 else "chunked"
        piece, S, z = call(cut(given, start, stop) | state, backend, normalize=normalize)
        ys.append(piece)
        state = {"S": S, "z": z}
    assert_close(torch.cat(ys, -2), y)
    assert_close(list(state.values()), last)


def test_not_even_an_infinite_future_is_seen() -> None:
    given = inputs(100)
    before = run(given, "chunked")[0]
    for rubbish in (7.0, torch.nan):
        given["k"][..., 60:, :] = rubbish
        assert_close(run(given, "chunked")[0][..., :60, :], before[..., :60, :], rtol=0, atol=0)


@every_normalization
def test_what_a_masked_token_holds_reaches_nothing(normalize: str | None) -> None:
    given, mask = inputs(70), laws.masks(70)["holes"]
    upstream = [torch.randn_like(x) for x in apart(given)]
    clean = everything(given | {"key_mask": mask}, upstream, "chunked", normalize=normalize)
    for name in "kv":
        given[name] = given[name].masked_fill(~mask.unsqueeze(-1), torch.nan)
    assert_same(everything(given | {"key_mask": mask}, upstream, "chunked", normalize=normalize), clean)


@pytest.mark.parametrize("batch", [1, 2])
def test_permuted_inputs(batch: int) -> None:
    """A layout of (batch, tokens, heads, channels) gives the same numbers; with one batch element too."""
    given = inputs(70, ((batch, 1), (batch, 3)))
    upstream = [torch.randn_like(x) for x in apart(given)]
    permuted = given | {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("v", "log_decay")}
    turned = [upstream[0].mT.contiguous().mT, *upstream[1:]]
    assert_same(everything(permuted, turned, "chunked"), everything(given, upstream, "chunked"))


@pytest.mark.parametrize("strength", [-1e-3, -20.0, -1000.0])
@every_normalization
def test_any_strength_of_decay(strength: float, normalize: str | None) -> None:
    """In float32 beside float64. The gradients of decays count by themselves: those of strong ones are small."""
    given = inputs(100)
    given["log_decay"] = strength * torch.rand_like(given["log_decay"])
    upstream = [torch.randn_like(x) for x in apart(given)]
    exact = everything(given, upstream, "reference", normalize=normalize)
    ours = everything({name: x.float() for name, x in given.items()}, upstream, "chunked", normalize=normalize)
    for name, x in exact.items():
        assert (ours[name].double() - x).norm() <= 1e-4 * x.norm() + 1e-30, name


@every_normalization
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision_is_near_float64(normalize: str | None, dtype: torch.dtype, bound: float) -> None:
    """On the same rounded inputs: outputs, states and all gradients, of values that have a mean."""
    given = inputs(300, ((1, 1), (1, 4)), d=16, dv=8)
    given = {name: (x + 3 if name == "v" else x).bfloat16().double() for name, x in given.items()}
    upstream = [torch.randn_like(x).bfloat16().double() for x in apart(given)]
    exact = everything(given, upstream, "reference", normalize=normalize)
    low = {name: x.float() if name in "Sz" else x.to(dtype) for name, x in given.items()}
    ours = everything(low, upstream, "chunked", normalize=normalize)
    errors = {name: relative(ours[name], exact[name]) for name in exact}
    assert max(errors.values()) <= bound, errors


@every_normalization
def test_derivatives_of_any_order_and_vmap(normalize: str | None) -> None:
    given = inputs(3, ((2, 1), (2, 2)), d=2, dv=2)
    given["log_decay"] = -0.1 - torch.rand_like(given["log_decay"])

    def attend(*x: Tensor) -> tuple[Tensor, ...]:
        return run(dict(zip(given, x, strict=True)), "chunked", normalize=normalize)

    tensors = tuple(x.requires_grad_() for x in given.values())
    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)
    together = torch.func.vmap(torch.func.grad(lambda *x: attend(*x)[0].sin().sum(), (0, 1, 2, 5)))(*tensors)
    assert_close(together, torch.autograd.grad(attend(*tensors)[0].sin().sum(), [tensors[i] for i in (0, 1, 2, 5)]))


def test_no_rows() -> None:
    for lead in (((0, 1), (0, 3)), ((1, 1), (2, 0))):
        given = inputs(70, lead)
        found = everything(given, [torch.randn_like(x) for x in apart(given)], "chunked")
        assert all(found[name].shape == x.shape for name, x in given.items())


def test_memory_saved_for_the_backward_is_the_inputs_and_a_state_per_block() -> None:
    given = inputs(4096, ((1, 1), (1, 2)), d=16, dv=16)
    given = {name: x.clamp(min=-1).requires_grad_() for name, x in given.items()}
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        run(given, "chunked")
    assert sum(saved.values()) <= 1.02 * sum(x.nbytes for x in given.values())


def test_it_is_chosen_where_it_computes_less() -> None:
    q, v, decay = torch.rand(1, 1, 9, 5), torch.rand(1, 3, 9, 2), -torch.rand(1, 3, 9)

    def chosen(q: Tensor, k: Tensor, log_decay: Tensor | None, **options: Any) -> object:
        mask = options.get("key_mask")
        return causal_call(q, k, v, None, log_decay, mask, options.get("normalize"), "identity")[0]

    assert chosen(q, q, decay) is SHARED
    assert chosen(q, q, decay, key_mask=torch.ones(9) > 0) is SHARED
    assert chosen(q, q, decay, key_mask=torch.ones(3, 9) > 0) is CAUSAL
    assert chosen(q.expand(1, 3, 9, 5), q, decay) is CAUSAL
    assert chosen(q, q, None) is CAUSAL
    assert chosen(q, q, decay, normalize="keys") is CAUSAL
    assert chosen(q, q, decay.unsqueeze(-1).expand(1, 3, 9, 5)) is GATED
    assert "chunked: runs this call" in explain_backend(q, q, v, log_decay=decay)
    y, state = causal_linear_attention(q, q, v, log_decay=decay)
    assert y.shape == v.shape and isinstance(state, LinearState) and state.S.shape == (1, 3, 5, 2)
