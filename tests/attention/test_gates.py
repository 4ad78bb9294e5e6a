"""Gates reach the attentions that need them, and others refuse them."""

import pytest
import torch
from torch.testing import assert_close

from linattn import TorchMultiheadAttention
from linattn.attention import (
    Decay,
    DeltaAttention,
    GateNeeds,
    Gates,
    InnerAttention,
    LinearAttention,
    RotaryAttention,
    SoftmaxAttention,
    SplitHeads,
    named_attention,
)
from linattn.feature_maps import ElementwiseFeatureMap, FavorFeatureMap
from tests.attention.cases import CHANNELS, FADING, GATED, HEADS, KEY_HEADS, gates_of, heads

ELU = ElementwiseFeatureMap("elu_plus_one")
N = 20


def fading(feature_map=ELU, **options) -> LinearAttention:
    return LinearAttention(feature_map, causal=True, needs=GateNeeds(decay="head"), **options)


def adding(needs: GateNeeds) -> LinearAttention:
    return LinearAttention(ELU, causal=True, normalize=None, needs=needs)


def favor() -> FavorFeatureMap:
    return FavorFeatureMap(CHANNELS, 40).double()


@pytest.mark.parametrize("inner", [SoftmaxAttention(causal=True), LinearAttention(ELU, causal=True)], ids=repr)
def test_what_needs_no_gates_refuses_them(inner):
    q, k, v = heads(N)
    for call in (inner, inner.extend):
        with pytest.raises(ValueError, match=f"{type(inner).__name__} takes no gates here, but some came"):
            call(q, k, v, gates=gates_of(GateNeeds(decay="head"), k))


@pytest.mark.parametrize("inner", [DeltaAttention(), fading(), SplitHeads((4, fading()))], ids=repr)
def test_what_needs_gates_refuses_to_run_without(inner):
    for call in (inner, inner.extend):
        with pytest.raises(ValueError, match=f"{type(inner).__name__} needs gates here, but none came"):
            call(*heads(N))


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (Gates(), r"log_decay must be \(2, 2, 20\), .* but is None"),
        (Gates(torch.zeros(2, 4, N)), r"log_decay must be \(2, 2, 20\), .* but is \(2, 4, 20\)"),
        (Gates(torch.zeros(2, 2, N, 6), torch.ones(2, 2, N)), r"but is \(2, 2, 20, 6\)"),
        (Gates(torch.zeros(2, 2, N)), r"beta must be \(2, 2, 20\), .* but is None"),
        (torch.zeros(2, 2, N), "needs Gates, but these are a Tensor"),
        (Gates([1.0], torch.ones(2, 2, N)), "log_decay must be a tensor, but is a list"),
        (Gates(torch.zeros(2, 2, N), 1.0), "beta must be a tensor, but is a float"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_gates_have_the_shape_of_the_keys(gates, message):
    with pytest.raises(ValueError, match=message):
        DeltaAttention(decay="head")(*heads(N), gates=gates)


@pytest.mark.usefixtures("unchecked")
def test_a_gate_that_is_not_needed_is_refused():
    with pytest.raises(ValueError, match="log_decay must be None"):
        DeltaAttention()(*heads(N), gates=Gates(torch.zeros(2, 2, N), torch.ones(2, 2, N)))


@pytest.mark.usefixtures("unchecked")
def test_a_mixture_takes_a_tuple():
    inner = named_attention("local:2+delta:2", num_heads=4, num_key_heads=2, head_dim=CHANNELS, causal=True)
    for gates in (Gates(None, torch.ones(2, 1, N)), (None,)):
        with pytest.raises(ValueError, match="a tuple with the gates of each of 2 parts"):
            inner(*heads(N), gates=gates)


def test_a_batch_of_one_serves_every_row():
    inner, (q, k, v) = DeltaAttention(decay="channel"), heads(N)
    one = gates_of(inner.needs, k[:1])
    both = Gates(*(x.expand(2, *x.shape[1:]) for x in one))
    assert_close(inner(q, k, v, gates=one), inner(q, k, v, gates=both))


@pytest.mark.parametrize("make", [lambda: ELU, favor], ids=["elu", "favor"])
def test_a_gate_of_one_number_is_a_fixed_decay(make):
    """For maps with a scale per token too, and added to a decay that is there."""
    feature_map, (q, k, v) = make(), heads(80)
    decay = Decay(KEY_HEADS).double()
    expected = LinearAttention(feature_map, causal=True, decay=decay)(q, k, v)
    constant = decay().expand(2, KEY_HEADS, 80)
    assert_close(fading(feature_map)(q, k, v, gates=Gates(constant)), expected)
    assert_close(fading(feature_map, decay=decay)(q, k, v, gates=Gates(torch.zeros_like(constant))), expected)


@pytest.mark.parametrize("make", [lambda: ELU, favor], ids=["elu", "favor"])
@pytest.mark.parametrize("normalize", ["output", "keys", None])
def test_a_decay_of_minus_infinity_begins_a_new_sequence(make, normalize):
    """Outputs and gradients are those of the sequences by themselves."""
    inner, x = fading(make(), normalize=normalize), [t.requires_grad_() for t in heads(90)]
    log_decay = gates_of(inner.needs, x[1].detach()).log_decay
    packed = log_decay.index_fill(-1, torch.tensor([0, 31, 32, 70]), -torch.inf)
    dy = torch.randn(2, HEADS, 90, CHANNELS, dtype=torch.float64)
    y = inner(*x, gates=Gates(packed))
    pieces = zip(*(t.split([31, 1, 38, 20], 2) for t in (*x, log_decay)), strict=True)
    alone = torch.cat([inner(*piece, gates=Gates(fades)) for *piece, fades in pieces], 2)
    assert_close(y, alone)
    assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(alone, x, dy))


@pytest.mark.parametrize("name", FADING)
def test_of_named_attentions_too(name):
    inner, x = named_attention(name, num_heads=4, num_key_heads=2, head_dim=CHANNELS, causal=True), heads(90)
    gates = gates_of(inner.needs, x[1])
    packed = gates.log_decay.index_fill(2, torch.tensor([0, 31, 32, 70]), -torch.inf)
    pieces = [zip(*(t.split([31, 1, 38, 20], 2) for t in x), strict=True)]
    pieces += [[None] * 4 if gate is None else gate.split([31, 1, 38, 20], 2) for gate in gates]
    alone = [inner(*piece, gates=Gates(*own)) for piece, *own in zip(*pieces, strict=True)]
    assert_close(inner(*x, gates=gates._replace(log_decay=packed)), torch.cat(alone, 2))


def test_a_decay_per_channel_is_not_for_maps_with_a_scale_per_token():
    inner, (q, k, v) = LinearAttention(favor(), causal=True, needs=GateNeeds(decay="channel")), heads(N)
    with pytest.raises(ValueError, match="kept in range by a scale per token"):
        inner(q, k, v, gates=gates_of(inner.needs, k))


@pytest.mark.parametrize("normalize", ["output", "keys", None])
def test_a_decay_per_channel_fades_the_sums_of_keys_too(normalize):
    """The same in every channel, it is a decay per head; and a fixed decay adds to it."""
    (q, k, v), decay = heads(80), Decay(KEY_HEADS).double()
    options = {"causal": True, "normalize": normalize, "decay": decay}
    by_channel = LinearAttention(ELU, needs=GateNeeds(decay="channel"), **options)
    by_head = LinearAttention(ELU, needs=GateNeeds(decay="head"), **options)
    log_decay = gates_of(by_head.needs, k).log_decay
    spread = log_decay.unsqueeze(-1).expand(k.shape)
    assert_close(by_channel(q, k, v, gates=Gates(spread)), by_head(q, k, v, gates=Gates(log_decay)))


def test_gates_of_masked_tokens_may_be_no_number():
    for needs in (GateNeeds("head", "step"), GateNeeds("head", "strength"), GateNeeds("channel", "strength")):
        delta = needs.write == "strength"
        inner: InnerAttention = DeltaAttention(decay=needs.decay)
        if not delta:
            inner = LinearAttention(ELU, causal=True, normalize=None, needs=needs)
        (q, k, v), key_mask = heads(N), torch.rand(2, 1, N) < 0.6
        gates = gates_of(needs, k)
        rubbish = Gates(*(torch.where(_as(key_mask, x), x, torch.nan).requires_grad_() for x in gates))
        y = inner(q, k, v, key_mask=key_mask, gates=rubbish)
        assert_close(y, inner(q, k, v, key_mask=key_mask, gates=gates))
        assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), rubbish))


def _as(key_mask: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return key_mask if gate.ndim == 3 else key_mask.unsqueeze(-1)


def test_rotary_hands_gates_on():
    plain, (q, k, v) = DeltaAttention(decay="head"), heads(N)
    turned = RotaryAttention(plain)
    gates = gates_of(plain.needs, k)
    y, state = turned.extend(q[:, :, :9], k[:, :, :9], v[:, :, :9], gates=Gates(*(x[:, :, :9] for x in gates)))
    z, _ = turned.extend(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state, gates=Gates(*(x[:, :, 9:] for x in gates)))
    assert_close(torch.cat([y, z], 2), turned(q, k, v, gates=gates))
    assert not torch.allclose(turned(q, k, v, gates=gates), plain(q, k, v, gates=gates))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearAttention(ELU, needs=GateNeeds(decay="head")), "gates belong to causal attention"),
        (lambda: fading(normalize="mean"), "normalize must be"),
        (lambda: LinearAttention(ELU, causal=True, needs=GateNeeds("head", "step")), "un-normalised attention"),
        (lambda: LinearAttention(ELU, causal=True, needs=GateNeeds()), "needs must be a GateNeeds"),
        (lambda: LinearAttention(ELU, causal=True, needs="head"), "needs must be a GateNeeds"),
        (lambda: LinearAttention(ELU, causal=True, normalize=None, needs=GateNeeds("channel", "step")), "needs must"),
        (lambda: DeltaAttention(decay="heads"), "needs must be a GateNeeds"),
        (lambda: adding(GateNeeds(None, "rate")), "needs must be a GateNeeds"),
        (lambda: adding(GateNeeds("head", "rate")), "needs must be a GateNeeds"),
        (lambda: adding(GateNeeds("channel", "rate")), "a rate is of the generalized delta rule"),
        (lambda: TorchMultiheadAttention(8, 2, inner=DeltaAttention()), "TorchMultiheadAttention makes no gates"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", GATED)
def test_gates_are_on_the_device_of_the_keys(name):
    inner, (q, k, v) = (
        named_attention(name, num_heads=HEADS, num_key_heads=KEY_HEADS, head_dim=CHANNELS, causal=True),
        heads(5),
    )
    gates = gates_of(inner.needs, k)
    for field, x in gates._asdict().items():
        if x is not None:
            with pytest.raises(ValueError, match=rf"one device, but k is on cpu and {field} on meta"):
                inner(q, k, v, gates=gates._replace(**{field: x.to("meta")}))
            with pytest.raises(ValueError, match=f"{field} must be a tensor, but is a ndarray"):
                inner(q, k, v, gates=gates._replace(**{field: x.numpy()}))
