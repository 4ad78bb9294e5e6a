"""Exported for one length and for any, with gradients and without, everything gives what it gives uncompiled."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.testing import assert_close

from linattn.attention import ATTENTIONS, InnerAttention, LinearAttention, named_attention, traits
from linattn.compat.linear_attention_transformer.axial import AxialAttention
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from linattn.feature_maps import FEATURE_MAPS
from linattn.models import LanguageModel, LanguageModelConfig
from tests.attention.cases import GatesFromKeys
from tests.laws import tokens
from tests.models.causal import structure
from tests.operators import causal, decaying, export, gated, over_all, sharing

LENGTH = Dim("n", min=2, max=100_000)
ELU = FEATURE_MAPS["elu"](8, 4, 2)


class Module(nn.Module):
    def __init__(self, operator: Callable[..., Tensor]):
        super().__init__()
        self.operator = operator

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.operator(q, k, v)


class Masked(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor) -> Tensor:
        return self.inner(q, k, v, key_mask=key_mask)


def holds_torchs_own_operators(program: ExportedProgram) -> bool:
    return not any("linattn" in str(node.target) for node in program.graph.nodes)


def heads(n: int) -> list[Tensor]:
    return [torch.randn(2, h, n, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]


def same_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    assert_close(found, expected)
    upstream = torch.randn_like(found)
    assert_close(*(torch.autograd.grad(y, inputs, upstream) for y in (found, expected)))


# traced with gradients, the causal ones are exported as attentions below, and the simplest one without, too
@pytest.mark.parametrize(
    ("operator", "grad"), [(over_all, False), (decaying, False), (gated, False), (over_all, True), (sharing, True)]
)
def test_the_operator(operator: Callable[..., Tensor], grad: bool) -> None:
    inputs = tuple(x.requires_grad_(grad) for x in tokens(70))
    program = export(Module(operator), inputs, dynamic_shapes=[{2: LENGTH}] * 3)
    assert holds_torchs_own_operators(program)
    for length in (2, 70, 600, 3001):
        others = [x.requires_grad_() for x in tokens(length)]
        same_gradients(program.module()(*others), operator(*others), others)


def make(name: str) -> InnerAttention:
    sizes = {"num_heads": 4, "num_key_heads": 2, "head_dim": 8, "window": 5, "max_length": 200}
    return named_attention(name, causal=True, **sizes).double()


def with_gates(inner: InnerAttention) -> InnerAttention:
    return inner if inner.needs is None else GatesFromKeys(inner)


def kind(name: str) -> tuple[object, ...]:
    """Return what an exported attention depends on. Feature maps are exported alone, in test_feature_maps.py."""
    inner = make(name)
    state = with_gates(inner).extend(*heads(3))[1]
    feature_map, normalize, decay = (getattr(inner, part, None) for part in ("feature_map", "normalize", "decay"))
    scaled = feature_map is not None and feature_map.key(heads(3)[1]).log_scale is not None
    return structure(state), type(inner), scaled, normalize, decay is None, repr(inner.needs)


CAUSAL = [*(name for name in ATTENTIONS if traits(name).causal), "local+elu"]
# the delta rule with a decay per channel is exported in test_delta.py, with its state too
KINDS = {kind(name): name for name in reversed(CAUSAL) if name != "kda"}.values()
# every kind is exported for any length, and for one length one of each kind of gates: they have the same code
ONE_LENGTH = {repr(make(name).needs): name for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_causal_attention(name: str) -> None:
    inner = with_gates(make(name))
    # what is traced without gradients may be asked for them, and the other way round
    modes = [(True, torch.enable_grad)]
    if name in ONE_LENGTH.values():
        modes += [(False, torch.no_grad)]
    if name == "identity":
        modes += [(False, torch.enable_grad), (True, torch.no_grad)]
    for dynamic, traced in modes:
        with traced():
            program = export(inner, tuple(heads(70)), dynamic_shapes=[{2: LENGTH}] * 3 if dynamic else None)
        assert holds_torchs_own_operators(program)
        module = program.module()
        for n in (2, 70, 200) if dynamic else (70,):
            inputs = heads(n)
            with torch.no_grad():
                assert_close(module(*inputs), inner(*inputs))
            same_gradients(module(*inputs), inner(*inputs), inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["favor", "softmax", "local+elu"])
def test_masks(name: str, causal: bool) -> None:
    inner = named_attention(name, num_heads=4, num_key_heads=2, head_dim=8, causal=causal, window=5).double()
    program = export(Masked(inner), (*heads(70), torch.rand(2, 1, 70) < 0.6), dynamic_shapes=[{2: LENGTH}] * 4)
    for n in (2, 70, 200):
        inputs, key_mask = heads(n), torch.rand(2, 1, n) < 0.6
        same_gradients(program.module()(*inputs, key_mask), inner(*inputs, key_mask=key_mask), inputs)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("AxialAttention", AxialAttention(LinearAttention(ELU, causal=True), 6)),
        ("BlindspotAttention", BlindspotAttention(LinearAttention(ELU, causal=True), 4)),
    ],
)
def test_what_is_exported_for_one_length_only_says_so(name: str, inner: nn.Module) -> None:
    inputs = [x.float() for x in heads(70)]
    assert_close(export(inner, tuple(inputs)).module()(*inputs), inner(*inputs))
    with pytest.raises(NotImplementedError, match=f"{name} can be exported for one length only"):
        torch.export.export(inner, tuple(inputs), dynamic_shapes=[{2: LENGTH}] * 3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operator", [causal, over_all])
def test_autocast_does_not_round_what_was_exported(operator: Callable[..., Tensor], dynamic: bool) -> None:
    inputs = tokens(70, dtype=torch.float32)
    shapes = [{2: LENGTH}] * 3 if dynamic else None
    exported = export(Module(operator), inputs, dynamic_shapes=shapes).module()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = exported(*inputs)
    assert_close(y, operator(*inputs))


@pytest.mark.parametrize("options", [{"convolution": 4}, {"convolution": 4, "convolution_on": "projections"}])
def test_convolutions_take_lengths_below_their_width(options: dict[str, object]) -> None:
    layers = ("elu", "convolution:5")
    config = LanguageModelConfig(vocab_size=50, dim=16, depth=2, num_heads=2, attention=layers, **options)  # pyright: ignore[reportArgumentType]
    model = LanguageModel(config).eval().double()
    module = export(model, (torch.randint(50, (2, 9)),), dynamic_shapes=[{1: LENGTH}]).module()
    for n in (2, 3, 4, 70):
        text = torch.randint(50, (2, n))
        assert_close(module(text), model(text))


def test_the_default_language_model() -> None:
    model = LanguageModel(LanguageModelConfig(vocab_size=50, dim=16, depth=1)).eval().double()
    shape = {0: Dim("b", max=100), 1: LENGTH}
    example = (torch.randint(50, (2, 70)), torch.rand(2, 70) < 0.7)
    program = export(model, example[:1], {"key_mask": example[1]}, dynamic_shapes=[shape, shape])
    module = program.module()
    for b, n in ((2, 2), (3, 70), (1, 300)):
        text, key_mask = torch.randint(50, (b, n)), torch.rand(b, n) < 0.7
        found, expected = module(text, key_mask=key_mask), model(text, key_mask=key_mask)
        assert_close(found, expected)
        gradients = []
        for owner, logits in ((module, found), (model, expected)):
            owner.zero_grad()
            logits.square().sum().backward()
            gradients.append({name: weight.grad for name, weight in owner.named_parameters()})
        assert_close(*gradients)
