"""torch.compile and torch.export of whole models. Run without jaxtyping's hook, whose checks break graphs."""

import pytest
import torch
from torch import nn
from torch.export import export
from torch.testing import assert_close

from linattn.attention.named import named_attention
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.nn import GatedConvolution, MultiheadAttention
from tests.models.causal import MODELS, VOCABULARY, some_tokens

# compiling takes seconds, so one of each kind; every operator and feature map is compiled in its own tests
KINDS = ["favor", "softmax", "mixture", "learned positions", "layers"]
every_kind = pytest.mark.parametrize("options", [MODELS[name] for name in KINDS], ids=KINDS)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(options, **more) -> LanguageModel:
    config = {"vocab_size": VOCABULARY, "dim": 16, "depth": 1, "window": 5} | options | more
    if isinstance(config["attention"], tuple):
        config["depth"] = len(config["attention"])
    return LanguageModel(LanguageModelConfig(**config)).eval()


def compiled(function):
    """One graph or an error; traced through autograd, run by torch, as generating code would take minutes."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("name", "masked"),
    [("favor", False), ("mixture", True), ("un-normalised", False), ("delta with convolutions of its own", True)],
)
def test_training_is_one_graph(name, masked):
    model, tokens = model_of(MODELS[name]).train(), some_tokens(2, 20)
    mask = torch.rand(2, 20) < 0.7 if masked else None
    expected = model(tokens, key_mask=mask)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    found = compiled(model)(tokens, key_mask=mask)
    assert_close(found, expected)
    for gradient, other in zip(
        gradients, torch.autograd.grad((found * weights).sum(), list(model.parameters())), strict=True
    ):
        assert_close(other, gradient, rtol=1e-4, atol=1e-5)


# a mixture without gates reads and goes on in test_transformers.py
@pytest.mark.parametrize("options", [MODELS[name] for name in ("learned positions", "mixture with gates")])
@torch.no_grad()
def test_prefill_and_decoding_are_one_graph_each(options):
    model, tokens = model_of(options), some_tokens(2, 20)
    # one graph, whatever is generated from it: an attention's, of which this is made, are traced further
    extend = torch.compile(model.extend, fullgraph=True, backend="eager")
    first, state = extend(tokens[:, :17])
    pieces = [first]
    for position in range(17, 20):
        logits, state = extend(tokens[:, position : position + 1], state)
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), model(tokens))


@torch.no_grad()
def test_a_token_of_a_constant_state_is_compiled_once():
    model, tokens = model_of(MODELS["mixture"]), some_tokens(1, 40)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    extend = torch.compile(model.extend, fullgraph=True, backend=count)
    _, state = model.extend(tokens[:, :30])
    for position in range(30, 40):
        _, state = extend(tokens[:, position : position + 1], state)
    # the first graph is for a state that lies in memory as the prefill leaves it
    assert 1 <= len(graphs) <= 2


@every_kind
@torch.no_grad()
def test_the_forward_is_exported(options):
    model = model_of(options)
    exported = export(model, (some_tokens(2, 20),)).module()
    tokens = some_tokens(2, 20)
    assert_close(exported(tokens), model(tokens))


class Step(nn.Module):
    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, tokens, state):
        return self.model.extend(tokens, state)


@every_kind
@torch.no_grad()
def test_a_step_of_decoding_is_exported(options):
    model, tokens = model_of(options), some_tokens(2, 20)
    _, state = model.extend(tokens[:, :18])
    if options["attention"] == "softmax":
        pytest.skip("softmax's state grows, so a step's shapes are not those of the next")
    step = export(Step(model), (tokens[:, 18:19], state)).module()
    first, state = step(tokens[:, 18:19], state)
    second, _ = step(tokens[:, 19:20], state)
    assert_close(torch.cat([first, second], 1), model(tokens)[:, 18:])


# what is causal is compiled as a model, above
def test_modules_alone_are_one_graph():
    inner = named_attention("local+elu", num_heads=4, head_dim=4, causal=False, window=5)
    for module in (MultiheadAttention(16, 4, inner, rotary=100.0, convolution=3, gate=True), GatedConvolution(16, 3)):
        x, mask = torch.randn(2, 20, 16), torch.rand(2, 20) < 0.7
        assert_close(compiled(module)(x, key_mask=mask), module(x, key_mask=mask))
