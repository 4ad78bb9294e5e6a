"""The laws of feature maps, over all of `FEATURE_MAPS`: a new entry is tested by existing."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.attention.linear import LinearAttention
from linattn.feature_maps import FEATURE_MAPS, FeatureMap
from linattn.ops.features import Features

HEAD_DIM, NUM_HEADS, NUM_KEY_HEADS = 16, 4, 2
# the only two whose similarities may be negative, and say so
SIGNED = {"identity", "favor_trigonometric"}
HALF = (torch.float16, torch.bfloat16)

every_map = pytest.mark.parametrize("name", FEATURE_MAPS)
both_sides = pytest.mark.parametrize("side", ["query", "key"])


def make(name: str, dtype: torch.dtype = torch.float64) -> FeatureMap:
    return FEATURE_MAPS[name](HEAD_DIM, NUM_HEADS, NUM_KEY_HEADS).to(dtype)


def tokens(side: str, n: int = 63, *, std: float = 1.0, dtype: torch.dtype = torch.float64, batch: int = 2) -> Tensor:
    heads = NUM_HEADS if side == "query" else NUM_KEY_HEADS
    return (torch.randn(batch, heads, n, HEAD_DIM, dtype=torch.float64) * std).to(dtype)


def mapped(feature_map: FeatureMap, side: str, x: Tensor) -> Features:
    return feature_map.query(x) if side == "query" else feature_map.key(x)


def scaled(feature_map: FeatureMap, side: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return mapped(feature_map, side, x).evaluated()[:2]


def features(feature_map: FeatureMap, side: str, x: Tensor) -> Tensor:
    return mapped(feature_map, side, x).value()


@every_map
@both_sides
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_scaled_features_are_finite(name, side, dtype):
    feature_map = make(name, dtype)
    for std in (1, 3, 10, 30, 100):
        raw = mapped(feature_map, side, tokens(side, std=std, dtype=dtype))
        for value, log_scale, _ in (raw, raw.evaluated()):
            assert value.isfinite().all() and value.dtype in (dtype, torch.float32)
            assert log_scale is None or (log_scale.isfinite().all() and log_scale.dtype == torch.float32)
        assert raw.value().dtype != torch.float16


@every_map
def test_similarities_are_not_negative(name):
    feature_map, q = make(name), tokens("query", 65, std=2)
    k = -q[:, :NUM_KEY_HEADS]
    similarity = features(feature_map, "query", q)[:, :NUM_KEY_HEADS] @ features(feature_map, "key", k).mT
    # 1 + cos is zero up to rounding
    assert name in SIGNED or similarity.min() > -1e-14
    assert name not in SIGNED or similarity.min() < -0.1


@every_map
@both_sides
def test_a_token_sees_itself_alone(name, side):
    feature_map, x = make(name), tokens(side)
    changed = x.clone()
    changed[..., 20:, :] *= 1000
    for before, after in zip(scaled(feature_map, side, x), scaled(feature_map, side, changed), strict=True):
        if before is not None:
            assert_close(after[:, :, :20], before[:, :, :20], rtol=0, atol=0)


@every_map
@both_sides
def test_the_batch_does_not_matter(name, side):
    feature_map, x = make(name), tokens(side, 64, batch=3)
    alone, together = features(feature_map, side, x[1:2, :, 5:9]), features(feature_map, side, x)
    assert_close(alone, together[1:2, :, 5:9], rtol=1e-13, atol=1e-13)


@every_map
@both_sides
@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_tokens(name, side, n):
    feature_map, x = make(name), tokens(side, n)
    width = features(feature_map, side, tokens(side, 5)).shape[-1]
    value, log_scale = scaled(feature_map, side, x)
    assert value.shape == features(feature_map, side, x).shape == (*x.shape[:-1], width)
    assert log_scale is None or log_scale.shape == x.shape[:-1]


@every_map
@both_sides
def test_gradients(name, side):
    feature_map, x = make(name), tokens(side, 2, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: features(feature_map, side, x), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: features(feature_map, side, x), x, fast_mode=True)


@pytest.mark.parametrize("name", [name for name in FEATURE_MAPS if list(make(name).parameters())])
def test_every_parameter_learns(name):
    feature_map = make(name)
    sum(features(feature_map, side, tokens(side)).square().sum() for side in ("query", "key")).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in feature_map.parameters())


@every_map
@both_sides
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_close_to_float64(name, side, dtype):
    feature_map, x = make(name, dtype), tokens(side, dtype=dtype)
    value, log_scale = scaled(feature_map, side, x)
    exact_value, exact_scale = scaled(feature_map.double(), side, x.double())
    if log_scale is not None:
        # where the largest feature lies may differ; what counts is the product
        value = value * (log_scale.double() - exact_scale).exp().unsqueeze(-1)
    error = (value.double() - exact_value).norm() / exact_value.norm()
    assert error < 3 * torch.finfo(dtype).eps


@every_map
@both_sides
def test_autocast_keeps_the_dtype_and_the_precision(name, side):
    feature_map, x = make(name, torch.float32), tokens(side, dtype=torch.float32)
    value, log_scale = scaled(feature_map, side, x)
    with torch.autocast("cpu", torch.bfloat16):
        cast_value, cast_scale = scaled(feature_map, side, x)
    assert cast_value.dtype == x.dtype
    assert (cast_value - value).norm() < 0.01 * value.norm()
    assert log_scale is None or torch.equal(cast_scale, log_scale)


@every_map
@both_sides
def test_no_randomness_and_no_change_in_training_or_evaluation(name, side):
    feature_map, x = make(name), tokens(side)
    before = copy.deepcopy(feature_map.state_dict())
    random_state = torch.get_rng_state()
    first = features(feature_map.train(), side, x.clone())
    kept = x.clone()
    assert torch.equal(features(feature_map.eval(), side, x), first)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(x, kept)
    assert all(torch.equal(before[key], value) for key, value in feature_map.state_dict().items())


@every_map
@both_sides
def test_copies_are_equal(name, side):
    feature_map, x = make(name), tokens(side)
    expected = features(feature_map, side, x)
    file = io.BytesIO()
    torch.save(feature_map, file)
    file.seek(0)
    loaded = make(name)
    loaded.load_state_dict(feature_map.state_dict())
    copies = [copy.deepcopy(feature_map), pickle.loads(pickle.dumps(feature_map)), loaded]
    for other in [*copies, torch.load(file, weights_only=False)]:
        assert torch.equal(features(other, side, x), expected)


@every_map
@both_sides
def test_made_on_meta_then_filled(name, side):
    with torch.device("meta"):
        feature_map = FEATURE_MAPS[name](HEAD_DIM, NUM_HEADS, NUM_KEY_HEADS)
    assert all(t.is_meta for t in feature_map.state_dict().values())
    # the test run fills uninitialised memory with NaN
    feature_map.to_empty(device="cpu")
    for part in feature_map.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    value, _ = scaled(feature_map, side, tokens(side, dtype=torch.float32))
    assert value.isfinite().all() and value.abs().sum() > 0


@every_map
@both_sides
@pytest.mark.parametrize("autocast", [False, True])
def test_meta_tensors_have_shapes(name, side, autocast):
    x, expected = tokens(side, dtype=torch.float32), scaled(make(name, torch.float32), side, tokens(side).float())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = scaled(make(name, torch.float32).to("meta"), side, x.to("meta"))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.is_meta and one.shape == other.shape and one.dtype == other.dtype)


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS.keys() - SIGNED))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_gradients_in_half_precision_are_finite(name, causal, dtype):
    attention = LinearAttention(make(name, dtype), causal=causal)
    q, k, v = (tokens(side, 65, std=3, dtype=dtype).requires_grad_() for side in ("query", "key", "key"))
    attention(q, k, v).float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, *attention.parameters()))


@every_map
def test_queries_and_keys_have_the_same_features(name):
    feature_map = make(name)
    assert feature_map.query(tokens("query")).x.shape[-1] == feature_map.key(tokens("key")).x.shape[-1]


@every_map
@both_sides
def test_composes_with_function_transforms(name, side):
    feature_map, x = make(name), tokens(side, 5)
    mapped = torch.func.vmap(lambda x: features(feature_map, side, x))(x)
    assert_close(mapped, features(feature_map, side, x))
    _, tangent = torch.func.jvp(lambda x: features(feature_map, side, x), (x,), (torch.ones_like(x),))
    step = 1e-6
    ahead, behind = (features(feature_map, side, x + s) for s in (step, -step))
    assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-6)
