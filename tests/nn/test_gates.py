"""Gates are made from a layer's input as the papers say, and start as there."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from linattn.attention import GateNeeds, named_attention
from linattn.attention.gates import SplitNeeds
from linattn.nn import MultiheadAttention, token_gates
from linattn.nn.gates import BoundedDecay, ChannelDecay, ChannelRate, HeadDecay, SigmoidDecay, WriteStrength
from tests.attention.cases import GATED

DIM, HEADS, KEY_DIM = 24, 4, 6


def some_inputs(n: int = 9) -> torch.Tensor:
    return torch.randn(2, n, DIM, dtype=torch.float64)


def test_a_decay_per_head_is_that_of_mamba2():
    decay, x = HeadDecay(DIM, HEADS).double(), some_inputs()
    step = F.softplus(x @ decay.proj.weight.T + decay.dt_bias)
    assert_close(decay(x), (-decay.A_log.exp() * step).mT)
    assert_close(decay.step(x), step.mT)


def test_a_decay_per_channel_is_kimis():
    decay, x = ChannelDecay(DIM, HEADS, KEY_DIM).double(), some_inputs()
    step = F.softplus(x @ (decay.out_proj.weight @ decay.in_proj.weight).T + decay.dt_bias)
    expected = -decay.A_log.exp()[:, None] * step.view(2, 9, HEADS, KEY_DIM)
    assert_close(decay(x), expected.transpose(1, 2))


def test_a_decay_per_channel_without_writes_is_that_of_gated_linear_attention():
    decay, x = SigmoidDecay(DIM, HEADS, KEY_DIM).double(), some_inputs()
    alpha = (x @ (decay.out_proj.weight @ decay.in_proj.weight).T + decay.out_proj.bias).sigmoid() ** (1 / 16)
    assert_close(decay(x).exp(), alpha.view(2, 9, HEADS, KEY_DIM).transpose(1, 2))


def test_a_decay_with_a_rate_is_that_of_rwkv7_and_at_least_0_545():
    decay, x = BoundedDecay(DIM, HEADS, KEY_DIM).double(), some_inputs()
    hidden = (x @ decay.in_proj.weight.T).tanh() @ decay.out_proj.weight.T + decay.bias
    expected = torch.exp(-(math.e**-0.5) * hidden.sigmoid()).view(2, 9, HEADS, KEY_DIM)
    assert_close(decay(x).exp(), expected.transpose(1, 2))
    with torch.no_grad():
        decay.bias.fill_(1e3)
    assert_close(decay(x).exp(), torch.full((2, HEADS, 9, KEY_DIM), 0.545).double(), rtol=1e-3, atol=0)


def test_bounded_decays_start_as_others_within_their_bound():
    zeros = torch.zeros(1, 1, DIM).double()
    bounded, other = (-kind(DIM, HEADS, KEY_DIM).double()(zeros)[0, :, 0] for kind in (BoundedDecay, ChannelDecay))
    assert other.max() > 1
    assert_close(bounded, other.clamp(max=0.5), rtol=1e-5, atol=0)


def test_a_rate_is_a_sigmoid_per_channel():
    rate, x = ChannelRate(DIM, HEADS, KEY_DIM).double(), some_inputs()
    expected = x @ (rate.out_proj.weight @ rate.in_proj.weight).T + rate.out_proj.bias
    assert_close(rate(x), expected.sigmoid().view(2, 9, HEADS, KEY_DIM).transpose(1, 2))


@pytest.mark.parametrize("limit", [1.0, 2.0])
def test_a_strength_lies_below_its_limit(limit):
    strength, x = WriteStrength(DIM, HEADS, limit=limit).double(), 100 * some_inputs()
    assert_close(strength(x), limit * (x @ strength.proj.weight.T).sigmoid().mT)
    assert strength(x).min() >= 0 and 0.99 * limit < strength(x).max() <= limit


@pytest.mark.parametrize("limit", [0.0, -1.0, 2.5])
def test_no_other_limit(limit):
    with pytest.raises(ValueError, match="beta_limit must be above 0 and at most 2"):
        token_gates(GateNeeds("head", "strength"), DIM, num_key_heads=4, key_dim=6, beta_limit=limit)


@pytest.mark.parametrize(
    "decay", [HeadDecay(DIM, 400), ChannelDecay(DIM, 400, KEY_DIM)], ids=lambda x: type(x).__name__
)
def test_decays_start_as_those_of_mamba2(decay):
    step, rate = F.softplus(decay.dt_bias.double()), decay.A_log.double().exp()
    for found, least, most in ((step.log(), math.log(0.001), math.log(0.1)), (rate, 1, 16)):
        assert least - 1e-3 <= found.min() < least + 0.1 * (most - least)
        assert most - 0.1 * (most - least) < found.max() <= most + 1e-3
        assert abs(found.mean() - (least + most) / 2) < 0.1 * (most - least)


def test_heads_start_from_slow_to_fast_and_one_head_is_slow():
    """Random ones of few heads may all forget at once, so that nothing is left to learn from."""
    rates = {heads: -HeadDecay(DIM, heads).double()(torch.zeros(1, 1, DIM).double()).flatten() for heads in (1, 4)}
    steps = torch.logspace(-3, -1, 4, dtype=torch.float64)
    assert_close(rates[1], steps[:1], rtol=1e-5, atol=0)
    assert_close(rates[4], steps * torch.tensor([1, 6, 11, 16]), rtol=1e-5, atol=0)


def test_each_head_starts_with_channels_from_slow_to_fast():
    decay = ChannelDecay(DIM, HEADS, KEY_DIM).double()
    found = -decay(torch.zeros(1, 1, DIM).double())[0, :, 0]
    steps = torch.logspace(-3, -1, KEY_DIM, dtype=torch.float64)
    assert_close(found, decay.A_log.exp()[:, None] * steps, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decays_are_not_rounded_to_half_precision(dtype):
    """A decay of 0.999 would be 1 in bfloat16, and the past would never fade."""
    for needs in (
        GateNeeds("head", "step"),
        GateNeeds("channel", "strength"),
        GateNeeds("channel", "rate"),
        GateNeeds("channel"),
    ):
        gates = token_gates(needs, DIM, num_key_heads=HEADS, key_dim=KEY_DIM)
        assert gates is not None
        x = some_inputs().to(dtype)
        found = gates.to(dtype)(x).log_decay
        assert found.dtype == torch.float32
        # the projections are rounded, but not what comes after
        assert_close(found.double(), gates.double()(x.double()).log_decay, rtol=0.02, atol=0)
        nothing = torch.zeros_like(x)
        assert_close(
            gates.to(dtype)(nothing).log_decay.double(), gates.double()(nothing.double()).log_decay, rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("name", GATED)
def test_a_module_made_without_memory_is_complete_after_a_reset(name):
    def make() -> MultiheadAttention:
        inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, causal=True)
        return MultiheadAttention(DIM, HEADS, inner)

    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    for part in module.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("name", GATED)
def test_heads_may_be_spread_over_ranks(name):
    """A rank with the rows of half the heads gives half the sum, as tensor parallel needs."""

    def make() -> MultiheadAttention:
        inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, causal=True)
        return MultiheadAttention(
            DIM, HEADS, inner, head_norm=True, gate=True, convolution=3, convolution_on="projections"
        ).double()

    whole, x, ys = make(), some_inputs(), []
    for rank in range(2):
        part = make()
        weights = {key: shard(key, value, rank) for key, value in whole.state_dict().items()}
        for key, value in weights.items():
            owner, _, leaf = key.rpartition(".")
            setattr(part.get_submodule(owner), leaf, nn.Parameter(value))
        ys.append(part(x))
    assert_close(ys[0] + ys[1], whole(x))


def shard(name: str, weight: torch.Tensor, rank: int) -> torch.Tensor:
    if name.endswith(("head_norm.weight", "in_proj.weight")):
        return weight
    over_columns = name == "o_proj.weight" or name.startswith("convolution.")
    return weight.chunk(2, -1 if over_columns else 0)[rank]


def test_parts_of_a_mixture_have_their_own():
    inner = named_attention("local:2+ssd:1+kda:1", num_heads=4, head_dim=6, causal=True)
    gates = token_gates(inner.needs, DIM, num_key_heads=4, key_dim=6)
    assert gates is not None
    none, ssd, kda = gates.double()(some_inputs())
    assert none is None
    assert ssd.log_decay.shape == ssd.beta.shape == kda.beta.shape == (2, 1, 9)
    assert kda.log_decay.shape == (2, 1, 9, 6)
    uneven = SplitNeeds((1, 3), (GateNeeds("head"), GateNeeds("head")))
    parts = token_gates(uneven, DIM, num_key_heads=8, key_dim=6)
    assert parts is not None
    assert [part.log_decay.shape[1] for part in parts.double()(some_inputs())] == [2, 6]
    assert token_gates(None, DIM, num_key_heads=4, key_dim=6) is None
