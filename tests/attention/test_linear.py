"""Linear attention's own laws: features at any size, decay, rotary features. What every attention obeys is
in test_laws.py."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.attention import Decay, LinearAttention, RotaryLinearAttention
from linattn.diagnostics import compare_with_softmax
from linattn.feature_maps import FEATURE_MAPS, ElementwiseFeatureMap, FavorFeatureMap, FeatureMap
from linattn.ops.features import Features
from linattn.ops.tokens.rotary import rotate
from tests import laws

HEADS, KEY_HEADS, CHANNELS = 4, 2, 6


def heads(n: int, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, h, n, CHANNELS, dtype=torch.float64) for h in (HEADS, KEY_HEADS, KEY_HEADS))
    return size * q, size * k, v


def feature_map(name: str) -> FeatureMap:
    return FEATURE_MAPS[name](CHANNELS, HEADS, KEY_HEADS).double()


def definition(
    attention: LinearAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, *, size: int = 1
) -> Tensor:
    """The matrix of similarities, its scales kept as logarithms and brought into range query by query. With a blindspot
    of `size` > 1, a query sees what its block began with."""
    n, groups = q.shape[2], q.shape[1] // k.shape[1]
    q, q_scale, _ = attention.feature_map.query(q).evaluated()
    k, k_scale, _ = attention.feature_map.key(k).evaluated()
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    log_weight = torch.zeros(2, HEADS, n, n, dtype=q.dtype)
    if k_scale is not None:
        log_weight = log_weight + k_scale.repeat_interleave(groups, 1).unsqueeze(-2)
    # masked tokens are none of a block's
    i, place = torch.arange(n), key_mask.cumsum(-1) - 1
    block = place // size
    if attention.decay is not None:
        now = place if size == 1 else block * size - 1
        age = now.unsqueeze(-1) - place.unsqueeze(-2)
        log_weight = log_weight + attention.decay().repeat_interleave(groups, 0).unsqueeze(-1) * age
    if attention.causal:
        seen = block.unsqueeze(-1) > block.unsqueeze(-2) if size > 1 else i[:, None] >= i
        log_weight = log_weight.masked_fill(~seen, -torch.inf)
    log_weight = log_weight.masked_fill(~key_mask.unsqueeze(-2), -torch.inf)
    top = log_weight.amax(-1, keepdim=True).nan_to_num(neginf=0)
    weight = (log_weight - top).exp()
    if attention.normalize == "keys":
        total = weight @ k
        q = torch.where(total == 0, 0, q / total)
    similarity = (q @ k.mT) * weight
    if attention.normalize == "output":
        return (similarity @ v / similarity.sum(-1, keepdim=True)).nan_to_num(0)
    # features normalised by their own sums need the queries' scale alone
    scale = top if attention.normalize is None else torch.zeros_like(top)
    return similarity @ v * (scale if q_scale is None else scale + q_scale.unsqueeze(-1)).exp()


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", ["default", None])
def test_agrees_with_the_definition_at_any_size(name: str, size: float, causal: bool, normalize: str | None) -> None:
    if normalize is None and size > 1:
        size = 2.0  # what is not normalised is as large as its features
    attention = LinearAttention(feature_map(name), causal=causal, normalize=normalize)
    inputs, mask = heads(70, size), laws.masks(70)["holes"]
    assert_close(attention(*inputs, key_mask=mask), definition(attention, *inputs, mask), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["elu", "exp", "favor", "efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_features_normalised_by_their_own_sums_agree_with_the_definition(name: str, causal: bool) -> None:
    attention = LinearAttention(feature_map(name), causal=causal, normalize="keys")
    inputs, mask = heads(70, 2.0), laws.masks(70)["holes"]
    assert_close(attention(*inputs, key_mask=mask), definition(attention, *inputs, mask), rtol=1e-6, atol=1e-9)


class AnyFeatures(FeatureMap):
    """Any two functions with scales that depend on the token."""

    def __init__(self, query: str, key: str):
        super().__init__()
        self.functions = query, key

    def query(self, x: Tensor) -> Features:
        return Features(x, x.sum(-1), self.functions[0])

    def key(self, x: Tensor) -> Features:
        return Features(x, x.sum(-1), self.functions[1])


@pytest.mark.parametrize(
    "functions", [("exp", "relu"), ("relu", "exp"), ("identity", "sigmoid"), ("softplus", "softplus")], ids="-".join
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", ["output", "keys", None])
def test_queries_and_keys_may_have_any_functions_and_scales(
    functions: tuple[str, str], causal: bool, normalize: str | None
) -> None:
    attention = LinearAttention(AnyFeatures(*functions), causal=causal, normalize=normalize)
    (q, k, v), mask = heads(70), laws.masks(70)["holes"]
    expected = definition(attention, q, k, v, mask)
    assert_close(attention(q, k, v, key_mask=mask), expected, rtol=1e-6, atol=1e-9)
    if causal:
        _, state = attention.extend(q[:, :, :40], k[:, :, :40], v[:, :, :40], key_mask=mask[..., :40])
        y, _ = attention.extend(q[:, :, 40:], k[:, :, 40:], v[:, :, 40:], state, key_mask=mask[..., 40:])
        assert_close(y, expected[:, :, 40:], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["identity", "elu", "exp", "favor", "efficient"])
@pytest.mark.parametrize("options", [{}, {"learned": True}], ids=["fixed", "learned"])
def test_a_decay_agrees_with_the_definition(name: str, options: dict[str, Any]) -> None:
    decay = Decay(KEY_HEADS, **options).double()
    # identity features have no positive sum to be normalised by
    normalize = None if name == "identity" else "default"
    attention = LinearAttention(feature_map(name), causal=True, decay=decay, normalize=normalize)
    inputs, mask = heads(80), laws.masks(80)["holes"]
    expected, present = definition(attention, *inputs, mask), mask.expand(-1, HEADS, -1)
    assert_close(attention(*inputs, key_mask=mask)[present], expected[present], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [1, 3])
def test_a_decay_of_other_heads_is_refused(count: int) -> None:
    attention = LinearAttention(feature_map("elu"), causal=True, decay=Decay(count))
    with pytest.raises(ValueError, match=f"the decay was made for {count} key heads, but there are 2"):
        attention(*heads(5))


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("decaying", [False, True])
def test_pieces_make_the_whole_at_any_size(name: str, size: float, decaying: bool) -> None:
    decay = Decay(KEY_HEADS).double() if decaying else None
    attention = LinearAttention(feature_map(name), causal=True, decay=decay)
    (q, k, v), mask = heads(70, size), laws.masks(70)["holes"]
    state, ys = None, []
    for start, stop in itertools.pairwise((0, 1, 2, 40, 70)):
        part = (x[:, :, start:stop] for x in (q, k, v))
        y, state = attention.extend(*part, state, key_mask=mask[..., start:stop])
        ys.append(y)
    assert_close(torch.cat(ys, 2), attention(q, k, v, key_mask=mask), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["exp", "efficient", "favor", "favor_hyperbolic"])
@pytest.mark.parametrize("causal", [False, True])
def test_exponential_features_never_overflow(name: str, dtype: torch.dtype, causal: bool) -> None:
    attention = LinearAttention(feature_map(name).float(), causal=causal)
    inputs = [x.to(dtype).requires_grad_() for x in heads(100, 100.0)]
    y = attention(*inputs)
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.float().sum(), inputs))


@pytest.mark.parametrize("name", ["exp", "efficient", "favor", "favor_hyperbolic"])
def test_a_huge_future_key_leaves_the_past_bitwise_as_it_was(name: str) -> None:
    attention = LinearAttention(feature_map(name).float(), causal=True)
    q, k, v = (x.float() for x in heads(100))
    before = attention(q, k, v)
    for factor in (10, 1000):
        k = torch.cat([k[:, :, :60], factor * k[:, :, 60:]], 2)
        assert torch.equal(attention(q, k, v)[:, :, :60], before[:, :, :60])


@pytest.mark.parametrize("name", ["exp", "efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_may_be_shifted(name: str, causal: bool) -> None:
    """As under a softmax: exp(k + c) = exp(k) exp(c) cancels."""
    attention = LinearAttention(feature_map(name), causal=causal)
    q, k, v = heads(70)
    for shift in (-300.0, 300.0):
        assert_close(attention(q, k + shift, v), attention(q, k, v))


@pytest.mark.parametrize("learned", [False, True])
def test_decay_is_that_of_retention(learned: bool) -> None:
    decay = Decay(3, learned=learned)
    expected = torch.tensor([1 - 2**-5, 1 - 2**-6, 1 - 2**-7])
    assert_close(decay().exp().squeeze(-1), expected)
    assert len(list(decay.parameters())) == learned
    with torch.device("meta"):
        empty = Decay(3, learned=learned)
    empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert_close(empty().exp().squeeze(-1), expected)
    double = decay.double()
    double.reset_parameters()
    assert_close(double().exp().squeeze(-1), expected.double(), rtol=1e-14, atol=0)


def test_a_learned_decay_learns() -> None:
    decay = Decay(KEY_HEADS, learned=True).double()
    attention = LinearAttention(FavorFeatureMap(CHANNELS).double(), causal=True, decay=decay)
    inputs = heads(30)

    def output(w: Tensor) -> Tensor:
        return torch.func.functional_call(attention, {"decay.w": w}, inputs)

    assert torch.autograd.gradcheck(output, decay.w, fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_features_agree_with_the_definition(causal: bool) -> None:
    attention = RotaryLinearAttention(feature_map("elu"), causal=causal, base=100.0)
    inputs, mask = heads(70), laws.masks(70)["holes"]
    q, k, v = attention.feature_map.query(inputs[0]).value(), attention.feature_map.key(inputs[1]).value(), inputs[2]
    k, v, places = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), (mask.cumsum(-1) - 1).clamp(min=0)
    weight = mask.unsqueeze(-2) * (torch.ones(70, 70).tril() if causal else torch.ones(70, 70))
    turned_q, turned_k = rotate(q, places, base=100.0), rotate(k, places, base=100.0)
    numerator, denominator = (turned_q @ turned_k.mT * weight) @ v, (q @ k.mT * weight).sum(-1, keepdim=True)
    expected = torch.where(denominator == 0, 0, numerator / denominator)
    assert_close(attention(*inputs, key_mask=mask), expected)


def test_rotary_features_make_the_whole_of_pieces() -> None:
    attention = RotaryLinearAttention(feature_map("elu"), causal=True)
    (q, k, v), mask = heads(70), laws.masks(70)["holes"]
    state, ys = None, []
    for start, stop in itertools.pairwise((0, 1, 1, 2, 40, 70)):
        part = (x[:, :, start:stop] for x in (q, k, v))
        y, state = attention.extend(*part, state, key_mask=mask[..., start:stop])
        ys.append(y)
    assert_close(torch.cat(ys, 2), attention(q, k, v, key_mask=mask))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "rows"}, "normalize must be"),
        ({"decay": Decay(2)}, "belong to causal attention"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearAttention(ElementwiseFeatureMap("elu_plus_one"), **options)


@pytest.mark.usefixtures("unchecked")
def test_what_rotary_features_cannot_do_is_refused() -> None:
    q, k, v = heads(10)
    for name in ("favor", "favor_trigonometric", "exp", "efficient"):
        with pytest.raises(ValueError, match="before such a map"):
            RotaryLinearAttention(feature_map(name))(q, k, v)
    attention = RotaryLinearAttention(feature_map("elu"))
    with pytest.raises(ValueError, match="the same tokens"):
        attention(q[:, :, :5], k, v)
    with pytest.raises(NotImplementedError, match="not causal"):
        attention.extend(q, k, v)


class Bare(FeatureMap):
    """Forgets to wrap its features, which are not negative."""

    def query(self, x):
        return x.exp()

    key = query


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("kind", [LinearAttention, RotaryLinearAttention])
@pytest.mark.parametrize("causal", [False, True])
def test_features_without_their_class_are_named(kind, causal, batch):
    q, k, v = torch.randn(3, batch, 4, 9, 6)
    with pytest.raises(ValueError, match="must be Features, as a feature map returns them, but is a Tensor"):
        kind(Bare(), causal=causal)(q, k, v)
    with pytest.raises(ValueError, match="must be Features, as a feature map returns them, but is a Tensor"):
        compare_with_softmax(q, k, Bare(), causal=causal)
