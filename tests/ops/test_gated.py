"""The laws of `causal_linear_attention` with a decay per channel, over its backends and normalisations."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, explain_backend, packed_log_decay
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.operators import GATED
from tests import laws
from tests.laws import LENGTHS
from tests.recurrence import relative

D, DV = 5, 3
Inputs = dict[str, Tensor]

BACKENDS = [name for name in GATED.run if name not in ("triton", "parallel")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_normalization = pytest.mark.parametrize("normalize", ["output", "keys", None])


def inputs(n: int, lead: tuple[int, ...] = (2, 3), d: int = D, dv: int = DV) -> Inputs:
    """Queries, keys, values, a state, and decays of which some begin a new sequence, in float64."""
    sizes = {"q": (n, d), "k": (n, d), "v": (n, dv), "S": (d, dv), "z": (d,), "log_decay": (n, d)}
    found = {name: torch.rand(*lead, *size, dtype=torch.float64) for name, size in sizes.items()}
    log_decay = (-found["log_decay"]).masked_fill(torch.rand(*lead, n, d) < 0.03, -torch.inf)
    signed = {name: torch.randn_like(found[name]) for name in ("v", "S")}
    return found | signed | {"z": found["z"] + 1, "log_decay": log_decay}


def call(given: Inputs, backend: str | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    state = LinearState(given["S"], given["z"]) if "S" in given else None
    masks = {name: given[name] for name in ("log_decay", "key_mask") if name in given}
    q, k, v = (given[name] for name in "qkv")
    y, after = causal_linear_attention(q, k, v, state, **masks, backend=backend, **options)
    return y, after.S, after.z


def part(given: Inputs, start: int, stop: int) -> Inputs:
    """Cut the tokens."""
    dims = {"S": None, "z": None, "key_mask": -1}
    cuts = {name: x.narrow(dims.get(name, -2), start, stop - start) for name, x in given.items() if name not in "Sz"}
    return {name: given[name] for name in "Sz" if name in given} | cuts


def run(given: Inputs, backend: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backend; the recurrent one is given token after token."""
    if backend != "recurrent":
        return call(given, backend, **options)
    y, S, z = call(part(given, 0, 0), "reference", **options)
    ys = [y]
    for i in range(given["q"].shape[-2]):
        y, S, z = call(part(given, i, i + 1) | {"S": S, "z": z}, backend, **options)
        ys.append(y)
    return torch.cat(ys, -2), S, z


def attention(backend: str, **options: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        given = {"q": q, "k": k, "v": v, "log_decay": -q.abs()}
        return run(given if key_mask is None else given | {"key_mask": key_mask}, backend, **options)[0]

    return attend


def upstream_of(given: Inputs, **options: Any) -> list[Tensor]:
    return [torch.randn_like(x) for x in run(given, "reference", **options)]


def everything(given: Inputs, upstream: list[Tensor], backend: str, **options: Any) -> Inputs:
    """Outputs, the state and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x.is_floating_point()}
    results = run(given | leaves, backend, **options)
    of_results = [x.to(y.dtype) for x, y in zip(upstream, results, strict=True)]
    wanted = list(leaves.values())
    gradients = torch.autograd.grad(results, wanted, of_results, allow_unused=True, materialize_grads=True)
    return dict(zip(("y", "last S", "last z", *leaves), (*results, *gradients), strict=True))


def assert_same(given: Inputs, other: Inputs, **to: Any) -> None:
    for name, x in given.items():
        assert_close(x, other[name], msg=lambda message, name=name: f"{name}: {message}", **to)


@every_backend
@every_normalization
def test_agrees_with_the_formula(backend: str, normalize: str | None) -> None:
    given = inputs(20, lead=())
    S, z = given["S"], given["z"]
    y, *last = run(given, backend, normalize=normalize)
    for t in range(20):
        q, k, v, alpha = (given[name][t] for name in ("q", "k", "v", "log_decay"))
        S, z = torch.diag(alpha.exp()) @ S + torch.outer(k, v), alpha.exp() * z + k
        q = q / z if normalize == "keys" else q
        assert_close(y[t], S.mT @ q / (q @ z if normalize == "output" else 1))
    assert_close(last, [S, z])


@pytest.mark.parametrize("backend", BACKENDS[:-1])
@every_normalization
@pytest.mark.parametrize("n", LENGTHS)
def test_outputs_states_and_gradients_agree_with_the_definition(backend: str, normalize: str | None, n: int) -> None:
    given = inputs(min(n, 5) if backend == "recurrent" else n)
    given["key_mask"] = laws.masks(given["q"].shape[-2])["holes"]
    options = {"normalize": normalize, "feature_map": "elu_plus_one" if n % 2 else "identity"}
    upstream = upstream_of(given, **options)
    expected = everything(given, upstream, "reference", **options)
    assert_same(everything(given, upstream, backend, **options), expected, rtol=1e-9, atol=1e-9)


@every_backend
@every_normalization
@pytest.mark.parametrize("n", [1, 21])
def test_features_by_name(backend: str, normalize: str | None, n: int) -> None:
    """φ(0) is not zero here: what fills up the last chunk adds nothing."""
    given = inputs(n)
    upstream, phi = upstream_of(given, normalize=normalize), ELEMENTWISE["elu_plus_one"].function
    exact = everything(given, upstream, "reference", normalize=normalize, feature_map="elu_plus_one")
    mapped = run(given | {name: phi(given[name]) for name in "qk"}, "reference", normalize=normalize)
    assert_close(tuple(exact.values())[:3], mapped)
    assert_same(everything(given, upstream, backend, normalize=normalize, feature_map="elu_plus_one"), exact)


@every_normalization
def test_equal_decays_of_all_channels_are_a_decay_per_head(normalize: str | None) -> None:
    given = inputs(200)
    per_head = given["log_decay"][..., 0].masked_fill(given["log_decay"][..., 0] < -1, -torch.inf)
    upstream = upstream_of(given)
    ours = everything(given | {"log_decay": per_head.unsqueeze(-1).expand(2, 3, 200, D)}, upstream, "chunked")
    theirs = everything(given | {"log_decay": per_head}, upstream, "chunked")
    assert_same(ours | {"log_decay": ours["log_decay"].sum(-1)}, theirs)


@every_normalization
def test_blocks_make_the_whole(normalize: str | None) -> None:
    """Two blocks of 256 tokens, and a rest."""
    given = inputs(520, lead=(4,), d=256, dv=2)
    upstream = upstream_of(given, normalize=normalize)
    expected = everything(given, upstream, "reference", normalize=normalize)
    assert_same(everything(given, upstream, "chunked", normalize=normalize), expected, rtol=1e-9, atol=1e-9)


@every_backend
@every_normalization
def test_pieces_make_the_whole(backend: str, normalize: str | None) -> None:
    cuts = (1, 2, 3, 20, 63, 64, 65, 128)
    given = inputs(130) | {"key_mask": laws.masks(130)["holes"]}
    y, *last = run(given, backend, normalize=normalize)
    ys, state = [], {name: given[name] for name in "Sz"}
    for start, stop in itertools.pairwise((0, *cuts, 130)):
        piece, S, z = run(part(given, start, stop) | state, backend, normalize=normalize)
        ys.append(piece)
        state = {"S": S, "z": z}
    assert_close(torch.cat(ys, -2), y)
    assert_close(list(state.values()), last)


@every_backend
@every_normalization
def test_the_past_does_not_see_the_future(backend: str, normalize: str | None) -> None:
    given = inputs(100)
    q, k, v = (given[name] for name in "qkv")
    attend = attention(backend, normalize=normalize)
    for at in (1, 64, 90) if backend == "chunked" else (60,):
        laws.the_past_does_not_see_the_future(attend, q, k, v, at)
    if backend in ("chunked", "recurrent"):
        before = attend(q, k, v)
        k[..., 60:, :] = torch.nan
        assert_close(attend(q, k, v)[..., :60, :], before[..., :60, :], rtol=0, atol=0)


@every_backend
def test_the_last_token_sees_everything(backend: str) -> None:
    for n in LENGTHS[1:]:
        given = inputs(min(n, 70 if backend == "chunked" else 5))
        laws.the_last_token_sees_everything(attention(backend), *(given[name] for name in "qkv"))


@every_backend
@every_normalization
@pytest.mark.parametrize("kind", ["left", "holes", "all"])
def test_a_masked_token_neither_writes_nor_decays(backend: str, normalize: str | None, kind: str) -> None:
    for n in (1, 65) if backend == "chunked" else (7,):
        given = inputs(n)
        attend = attention(backend, normalize=normalize, feature_map="softplus")
        q, k, v = (given[name] for name in "qkv")
        laws.a_masked_key_is_a_missing_key(attend, q, k, v, laws.masks(n)[kind])
        _, *state = run(given | {"key_mask": torch.zeros(2, 1, n, dtype=torch.bool)}, backend, normalize=normalize)
        assert_close(state, [given["S"], given["z"]], rtol=0, atol=0)


@every_backend
@every_normalization
def test_what_a_masked_token_holds_reaches_no_gradient(backend: str, normalize: str | None) -> None:
    n = 70 if backend == "chunked" else 9
    given = inputs(n)
    holes, options = laws.masks(n)["holes"], {"normalize": normalize, "feature_map": "softplus"}
    tokens, attend = (given[name] for name in "qkv"), attention(backend, **options)
    laws.a_masked_token_has_no_effect_on_gradients(attend, *tokens, holes, torch.nan, queries=True)
    mask = holes.expand(2, 3, n)
    upstream = upstream_of(given | {"key_mask": mask}, **options)
    clean = everything(given | {"key_mask": mask}, upstream, backend, **options)
    for name in ("k", "v", "log_decay"):
        given[name] = given[name].masked_fill(~mask.unsqueeze(-1), torch.nan)
    assert_same(everything(given | {"key_mask": mask}, upstream, backend, **options), clean)


@every_backend
@every_normalization
def test_packed_sequences_do_not_see_each_other(backend: str, normalize: str | None) -> None:
    lengths = (0, 1, 64, 5, 0, 60)
    n, ends = sum(lengths), torch.tensor([0, *itertools.accumulate(lengths)])
    given = {name: x for name, x in inputs(n).items() if name not in "Sz"}
    upstream = upstream_of(given)
    begins = packed_log_decay(ends, n).double().unsqueeze(-1)
    options, last = {"normalize": normalize}, [0 * x for x in upstream[1:]]
    packed = given | {"log_decay": given["log_decay"] + begins}
    together = everything(packed, [upstream[0], *last], backend, **options)
    for start, stop in itertools.pairwise(ends.tolist()):
        alone = everything(part(given, start, stop), [upstream[0][..., start:stop, :], *last], "chunked", **options)
        for name in ("y", "q", "k", "v"):
            assert_close(together[name][..., start:stop, :], alone[name])


@every_backend
@pytest.mark.parametrize(
    ("fewer", "normalize"),
    [("k", "keys"), ("v", None), ("q", "keys"), ("log_decay", "output"), ("k v S z", None)]
    + [("k v log_decay S z", normalize) for normalize in ("output", "keys", None)],
)
def test_fewer_heads_are_shared(backend: str, fewer: str, normalize: str | None) -> None:
    given = inputs(70 if backend == "chunked" else 9)
    for name in fewer.split():
        given[name] = given[name][:, :1]
    results = run(given, backend, normalize=normalize)
    spread = {name: x.expand(2, 3, *x.shape[2:]) for name, x in given.items()}
    for ours, expected in zip(results, run(spread, "reference", normalize=normalize), strict=True):
        assert_close(ours.expand_as(expected), expected)
    upstream = [torch.randn_like(x) for x in results]
    expected = everything(given, upstream, "reference", normalize=normalize)
    assert_same(everything(given, upstream, backend, normalize=normalize), expected)


@pytest.mark.parametrize("backend", ["chunked", "plain", "reference"])
def test_leading_dimensions_broadcast(backend: str) -> None:
    """None at all, few and many."""
    given = inputs(70, lead=(4, 3, 2)) | {"k": inputs(70, lead=(3, 1))["k"], "v": inputs(70, lead=())["v"]}
    given |= {
        "log_decay": inputs(70, lead=(4, 1, 1))["log_decay"],
        "S": given["S"][:, :, :1],
        "z": given["z"][:, :, :1],
    }
    upstream = upstream_of(given)
    spread = {name: x.expand(4, 3, 2, *x.shape[-2:]) for name, x in given.items() if name not in "Sz"}
    spread |= {"S": given["S"].expand(4, 3, 2, D, DV), "z": given["z"].expand(4, 3, 2, D)}
    assert_close(run(given, backend)[0], run(spread, "reference")[0])
    assert_same(everything(given, upstream, backend), everything(given, upstream, "reference"))


@every_backend
@pytest.mark.parametrize("batch", [1, 2])
def test_permuted_and_strided_inputs(backend: str, batch: int) -> None:
    """A layout of (batch, tokens, heads, channels) gives the same numbers; with one batch element too."""
    given = inputs(70, lead=(batch, 3))
    upstream = upstream_of(given)
    permuted = {name: torch.stack([x, x], -1).transpose(1, 2).contiguous() for name, x in given.items()}
    permuted = {name: x.transpose(1, 2)[..., 0] for name, x in permuted.items()}
    assert not permuted["q"].is_contiguous()
    turned = [upstream[0].mT.contiguous().mT, *upstream[1:]]
    theirs = everything(given, upstream, backend)
    for x in (upstream, turned):
        assert_same(everything(permuted, x, backend), theirs)


@every_backend
@pytest.mark.parametrize("strength", [-1e-3, -5.0, -20.0, -1000.0])
@every_normalization
def test_any_strength_of_decay(backend: str, strength: float, normalize: str | None) -> None:
    given = inputs(70)
    given["log_decay"] = strength * torch.rand_like(given["log_decay"])
    given["log_decay"][..., 30:40, :] = strength
    check_in_float32(given, backend, normalize)


@every_backend
@pytest.mark.parametrize("strength", [-2.6, -5.7, -13.0, -40.0])
def test_gradients_of_decays_that_are_all_strong(backend: str, strength: float) -> None:
    """Each gradient is as small as its decay, and must not be what rounding leaves of larger sums."""
    given = inputs(70)
    given["log_decay"] = torch.full_like(given["log_decay"], strength)
    check_in_float32(given, backend, None)


def check_in_float32(given: dict[str, Tensor], backend: str, normalize: str | None) -> None:
    """Compare with float64. The gradients of decays count by themselves: those of strong ones are small."""
    upstream = upstream_of(given, normalize=normalize)
    exact = everything(given, upstream, "reference", normalize=normalize)
    ours = everything({name: x.float() for name, x in given.items()}, upstream, backend, normalize=normalize)
    for name, x in exact.items():
        assert (ours[name].double() - x).norm() <= 1e-4 * x.norm() + 1e-38, name


@every_backend
@pytest.mark.parametrize("strength", [-1.0, -4.0])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
def test_values_near_the_ends_of_the_range_of_float32(backend: str, strength: float, scale: float) -> None:
    """The products inside a chunk divide by decays: neither these nor their gradients may leave the range."""
    given = inputs(70)
    given |= {"log_decay": strength * torch.rand_like(given["log_decay"])}
    given |= {name: scale * given[name] for name in ("v", "S")}
    check_in_float32(given, backend, None)


@every_backend
def test_what_is_not_a_number_stays_in_its_sequence(backend: str) -> None:
    """A NaN among the decays of a batch element, with strong decays in the others."""
    given = inputs(70)
    expected, given["log_decay"] = run(given, backend), given["log_decay"].clone()
    given["log_decay"][1, 2, 40, 1] = torch.nan
    for x, other in zip(run(given, backend), expected, strict=True):
        assert_close(x[0], other[0])
        assert_close(x[1, :2], other[1, :2])


@every_backend
@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_very_low_decay_is_minus_infinity(backend: str, low: float) -> None:
    """To the last bit, and its own gradient is zero."""
    given = inputs(70)
    upstream = upstream_of(given)
    expected = everything(given, upstream, backend)
    begins = given["log_decay"] == -torch.inf
    ours = everything(given | {"log_decay": given["log_decay"].masked_fill(begins, low)}, upstream, backend)
    assert_same(ours, expected, rtol=0, atol=0)
    assert not expected["log_decay"][begins].any() and expected["log_decay"][~begins].any()


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@every_normalization
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)])
def test_low_precision_is_near_float64(backend: str, normalize: str | None, dtype: torch.dtype, bound: float) -> None:
    """On the same rounded inputs: outputs, states and all gradients, of values that have a mean."""
    given = inputs(20 if backend == "recurrent" else 300, lead=(2,), d=16, dv=8)
    given = {name: (x + 3 if name == "v" else x).bfloat16().double() for name, x in given.items()}
    upstream, options = [x.bfloat16().double() for x in upstream_of(given)], {"normalize": normalize}
    exact = everything(given, upstream, "reference", **options)
    low = {name: x.float() if name in "Sz" else x.to(dtype) for name, x in given.items()}
    ours = everything(low, upstream, backend, **options)
    assert ours["y"].dtype == dtype and ours["last S"].dtype == ours["last z"].dtype == torch.float32
    errors = {name: relative(ours[name], exact[name]) for name in exact}
    assert max(errors.values()) <= bound, errors


@every_normalization
def test_derivatives_of_any_order(normalize: str | None) -> None:
    given = inputs(3, lead=(1,), d=2, dv=2)
    given["log_decay"] = -0.1 - torch.rand_like(given["log_decay"])
    tensors = [x.requires_grad_() for x in given.values()]

    def attend(*x: Tensor) -> tuple[Tensor, ...]:
        return call(dict(zip(given, x, strict=True)), "chunked", normalize=normalize)

    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors, fast_mode=True)


@pytest.mark.parametrize("n", [1, 70])
def test_vmap_of_gradients_is_a_loop(n: int) -> None:
    given = inputs(n)

    def loss(*x: Tensor) -> Tensor:
        return sum((y.square().sum() for y in call(dict(zip(given, x, strict=True)))), torch.zeros(()))

    gradient = torch.func.grad(loss, argnums=tuple(range(len(given))))
    together = torch.func.vmap(gradient)(*given.values())
    apart = zip(*(gradient(*(x[i] for x in given.values())) for i in range(2)), strict=True)
    assert_close(together, tuple(torch.stack(g) for g in apart))


def test_autocast_does_not_round_the_states() -> None:
    given = {name: x.float() for name, x in inputs(70).items()}
    upstream = upstream_of(given)
    for backend in ("chunked", "plain", "reference"):
        plain = everything(given, upstream, backend)
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = run(leaves, backend)
        mixed = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), upstream), strict=True))
        assert_same(mixed, plain)


@every_backend
@pytest.mark.parametrize("lead", [(0, 3), (2, 0)])
def test_no_rows(backend: str, lead: tuple[int, ...]) -> None:
    given = inputs(70, lead=lead)
    found = everything(given, upstream_of(given), backend)
    assert all(found[name].shape == x.shape for name, x in given.items())


def test_inputs_are_not_modified() -> None:
    given = inputs(70) | {"key_mask": laws.masks(70)["holes"]}
    copies, upstream = {name: x.clone() for name, x in given.items()}, upstream_of(given)
    for backend in ("chunked", "plain", "reference"):
        everything(given, upstream, backend, feature_map="elu_plus_one")
        assert all(torch.equal(x, copies[name]) for name, x in given.items())


def test_memory_saved_for_the_backward_is_the_inputs_and_a_state_per_block() -> None:
    given = inputs(4096, lead=(1, 2), d=16, dv=16)
    given["log_decay"] = given["log_decay"].clamp(min=-1)
    given = {name: x.requires_grad_() for name, x in given.items()}
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        call(given, "chunked")
    assert sum(saved.values()) <= 1.01 * sum(x.nbytes for x in given.values())


def test_a_backend_is_chosen_and_explained() -> None:
    one, many = inputs(1), inputs(9)
    texts = [explain_backend(*(x[name] for name in "qkv"), log_decay=x["log_decay"]) for x in (one, many)]
    assert "recurrent: runs this call" in texts[0]
    assert texts[1] == (
        "triton: has no kernels for a decay per channel\n"
        "recurrent: takes one token at a time, but q is (2, 3, 9, 5)\n"
        'parallel: has no decay and no normalize="keys"\n'
        "chunked: runs this call\n"
        "plain: can run it, when named\n"
        "reference: can run it, when named"
    )
    with pytest.raises(NotImplementedError, match="triton: has no kernels for a decay per channel"):
        call(many, "triton")


@pytest.mark.usefixtures("unchecked")
def test_wrong_decays_are_refused() -> None:
    given = inputs(9)
    with pytest.raises(ValueError, match=r"log_decay must be \(..., 9\) or \(..., 9, 5\), as k is .*, but is"):
        call(given | {"log_decay": given["log_decay"][..., :4]})
    with pytest.raises(ValueError, match="must not be positive"):
        call(given | {"log_decay": -given["log_decay"]})
    with pytest.raises(ValueError, match="leading dimensions must broadcast"):
        call(given | {"log_decay": given["log_decay"][:, :2]})
