"""transformers' own layers with gates, at random weights: `MultiheadAttention` with their weights gives their outputs,
gradients and cached decoding. They compute in float32, and ours in float64 here.

Ours has every projection by itself and a head of q and k for each of v: where theirs share a group over heads, its
weights are repeated, and gradients are summed. Their lengths of q and k, about 1 here, have an epsilon of 1e-6."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close
from transformers import DynamicCache, KimiLinearConfig, Mamba2Config, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from linattn.attention import named_attention
from linattn.models import PRESETS
from linattn.nn import MultiheadAttention
from tests.models.presets import attention_options

DIM, HEADS, GROUPS, HEAD_DIM, KEY_DIM, WIDTH = 16, 4, 2, 8, 12, 4
EPS = 1e-3
Weights = dict[str, Tensor]


def ours(preset: str, *, key_dim: int = KEY_DIM) -> MultiheadAttention:
    """The first layer of a published architecture, as `PRESETS` has it, in these sizes."""
    inner = named_attention(PRESETS[preset].attention[0], num_heads=HEADS, head_dim=key_dim, causal=True)
    options = attention_options(preset) | {"head_dim": HEAD_DIM, "key_dim": key_dim, "head_norm_eps": EPS}
    return MultiheadAttention(DIM, HEADS, inner, **options)


def convolutions(weight: Tensor, bias: Tensor | None, sizes: tuple[int, int, int]) -> Weights:
    """Ours add their input, and so have one less at the token itself."""
    own = weight.squeeze(1).T - torch.eye(WIDTH, device=weight.device)[:, -1:]
    names = [f"convolution.parts.{i}" for i in range(3)]
    biases = own.new_zeros(sum(sizes)) if bias is None else bias
    weights = {f"{name}.weight": part for name, part in zip(names, own.split(sizes, 1), strict=True)}
    return weights | {f"{name}.bias": part for name, part in zip(names, biases.split(sizes), strict=True)}


def over_heads(x: Tensor, groups: int) -> Tensor:
    """Repeat the rows of each group for each of its heads."""
    return x.unflatten(0, (groups, -1)).repeat_interleave(HEADS // groups, 0).flatten(0, 1)


def qwen3_next() -> tuple[nn.Module, Any]:
    config = Qwen3NextConfig(
        hidden_size=DIM,
        linear_num_key_heads=GROUPS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_conv_kernel_dim=WIDTH,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
        rms_norm_eps=EPS,
    )
    return Qwen3NextGatedDeltaNet(config, 0), config


def of_qwen3_next(theirs: Weights) -> Weights:
    per_group, shared = HEADS // GROUPS, GROUPS * KEY_DIM
    sizes = (KEY_DIM, KEY_DIM, per_group * HEAD_DIM, per_group * HEAD_DIM)
    rows = theirs["in_proj_qkvz.weight"].unflatten(0, (GROUPS, -1)).split(sizes, 1)
    q, k, v, z = (x.flatten(0, 1) for x in rows)
    b, a = (x.flatten(0, 1) for x in theirs["in_proj_ba.weight"].unflatten(0, (GROUPS, -1)).chunk(2, 1))
    of_q, of_k, of_v = theirs["conv1d.weight"].split((shared, shared, HEADS * HEAD_DIM))
    repeated = torch.cat([over_heads(of_q, GROUPS), over_heads(of_k, GROUPS), of_v])
    return convolutions(repeated, None, (HEADS * KEY_DIM, HEADS * KEY_DIM, HEADS * HEAD_DIM)) | {
        "q_proj.weight": over_heads(q, GROUPS),
        "k_proj.weight": over_heads(k, GROUPS),
        "v_proj.weight": v,
        "g_proj.weight": z,
        "o_proj.weight": theirs["out_proj.weight"],
        "head_norm.weight": theirs["norm.weight"],
        "gates.decay.proj.weight": a,
        "gates.decay.A_log": theirs["A_log"],
        "gates.decay.dt_bias": theirs["dt_bias"],
        "gates.strength.proj.weight": b,
    }


def kimi_linear() -> tuple[nn.Module, Any]:
    config = KimiLinearConfig(
        hidden_size=DIM,
        linear_num_heads=HEADS,
        linear_head_dim=HEAD_DIM,
        linear_conv_kernel_dim=WIDTH,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
        rms_norm_eps=EPS,
    )
    return KimiLinearDeltaAttention(config, 0), config


def of_kimi_linear(theirs: Weights) -> Weights:
    """Ours has one matrix for the output's gate, theirs a product of two."""
    same = {f"{name}.weight": theirs[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    return convolutions(theirs["conv1d.weight"], None, (HEADS * HEAD_DIM,) * 3) | {
        **same,
        "g_proj.weight": theirs["g_b_proj.weight"] @ theirs["g_a_proj.weight"],
        "head_norm.weight": theirs["o_norm.weight"],
        "gates.decay.in_proj.weight": theirs["forget_gate.f_a_proj.weight"],
        "gates.decay.out_proj.weight": theirs["forget_gate.f_b_proj.weight"],
        "gates.decay.A_log": theirs["forget_gate.A_log"].flatten(),
        "gates.decay.dt_bias": theirs["forget_gate.dt_bias"],
        "gates.strength.proj.weight": theirs["b_proj.weight"],
    }


def mamba2() -> tuple[nn.Module, Any]:
    config = Mamba2Config(
        hidden_size=DIM,
        expand=HEADS * HEAD_DIM // DIM,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        state_size=KEY_DIM,
        n_groups=1,
        conv_kernel=WIDTH,
        chunk_size=32,
        num_hidden_layers=1,
        layer_norm_epsilon=EPS,
    )
    return Mamba2Mixer(config, 0), config


def of_mamba2(theirs: Weights) -> Weights:
    """Their x is v, B is k and C is q, these two shared by all heads."""
    width = HEADS * HEAD_DIM
    z, v, k, q, dt = theirs["in_proj.weight"].split((width, width, KEY_DIM, KEY_DIM, HEADS))
    of_v, of_k, of_q = theirs["conv1d.weight"].split((width, KEY_DIM, KEY_DIM))
    bias_v, bias_k, bias_q = theirs["conv1d.bias"].split((width, KEY_DIM, KEY_DIM))
    weight, bias = (
        torch.cat([over_heads(of_q, 1), over_heads(of_k, 1), of_v])
        for of_q, of_k, of_v in ((of_q, of_k, of_v), (bias_q, bias_k, bias_v))
    )
    return convolutions(weight, bias, (HEADS * KEY_DIM, HEADS * KEY_DIM, width)) | {
        "q_proj.weight": over_heads(q, 1),
        "k_proj.weight": over_heads(k, 1),
        "v_proj.weight": v,
        "g_proj.weight": z,
        "o_proj.weight": theirs["out_proj.weight"],
        "gated_norm.weight": theirs["norm.weight"],
        "value_skip": theirs["D"],
        "gates.decay.proj.weight": dt,
        "gates.decay.A_log": theirs["A_log"],
        "gates.decay.dt_bias": theirs["dt_bias"],
    }


LAYERS: dict[
    str, tuple[Callable[[], tuple[nn.Module, Any]], Callable[[], MultiheadAttention], Callable[..., Weights]]
] = {
    "qwen3_next": (qwen3_next, lambda: ours("gated_deltanet"), of_qwen3_next),
    "kimi_linear": (kimi_linear, lambda: ours("kimi_linear", key_dim=HEAD_DIM), of_kimi_linear),
    "mamba2": (mamba2, lambda: ours("mamba2"), of_mamba2),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def made(name: str) -> tuple[nn.Module, Any, MultiheadAttention, Callable[..., Weights]]:
    make, our_own, translate = LAYERS[name]
    # a norm per head magnifies what theirs rounds where q·k is nearly zero; with this seed it is at no token
    torch.manual_seed(0)
    theirs, config = make()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            parameter.normal_(std=1.0 if "conv1d" in parameter_name else 0.3)
    return theirs.eval(), config, our_own().double().eval(), translate


def close(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest number."""
    assert expected.abs().max() > 1e-3
    assert_close(found.float() / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-5)


@every_layer
def test_outputs_and_gradients_are_theirs(name):
    theirs, _, mine, translate = made(name)
    x = torch.randn(2, 70, DIM, requires_grad=True)
    weights = dict(theirs.named_parameters())
    leaves = [x, *weights.values()]
    expected = theirs(x)
    translated = {key: weight.double() for key, weight in translate(weights).items()}
    assert set(translated) == set(mine.state_dict())
    found = functional_call(mine, translated, (x.double(),))
    close(found, expected)
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, leaves, dy.double())
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, leaves, dy), strict=True):
        close(gradient, wanted)


@every_layer
@torch.no_grad()
def test_cached_decoding_is_theirs(name):
    theirs, config, mine, translate = made(name)
    mine.load_state_dict(translate(dict(theirs.named_parameters())))
    x, cache, state = torch.randn(2, 45, DIM), DynamicCache(config=config), None
    for piece in x.split((40, 1, 1, 1, 1, 1), 1):
        expected = theirs(piece, cache=cache)
        found, state = mine.extend(piece.double(), state)
        close(found, expected)
