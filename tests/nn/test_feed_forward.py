import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from linattn.nn import Chunked, FeedForward, GatedFeedForward

both = pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])


def test_is_gpt2s():
    module, x = FeedForward(6, 10), torch.randn(2, 5, 6)
    up, down = module.up_proj, module.down_proj
    assert_close(module(x), F.gelu(x @ up.weight.mT + up.bias) @ down.weight.mT + down.bias)


def test_the_gated_one_is_swiglu():
    module, x = GatedFeedForward(6, 10), torch.randn(2, 5, 6)
    hidden = F.silu(x @ module.gate_proj.weight.mT) * (x @ module.up_proj.weight.mT)
    assert_close(module(x), hidden @ module.down_proj.weight.mT)


def test_dropout_is_on_the_output_in_training():
    for kind in (FeedForward, GatedFeedForward):
        module, x = kind(6, 10, dropout=0.5), torch.randn(2, 50, 6)
        y = module(x)
        kept = y != 0
        assert 0.3 < kept.float().mean() < 0.7
        assert_close(y[kept], (2 * module.eval()(x))[kept])


@pytest.mark.parametrize(
    "activation", [F.relu, F.gelu, torch.sigmoid, nn.Tanh()], ids=["relu", "gelu", "sigmoid", "Tanh"]
)
def test_any_activation_with_biases(activation):
    x = torch.randn(2, 5, 6)
    plain, gated = FeedForward(6, 10, activation=activation), GatedFeedForward(6, 10, activation=activation, bias=True)
    assert_close(plain(x), plain.down_proj(activation(plain.up_proj(x))))
    assert_close(gated(x), gated.down_proj(activation(gated.gate_proj(x)) * gated.up_proj(x)))


@both
def test_without_biases_zeros_stay_zeros(kind):
    assert kind(6, 10, bias=False)(torch.zeros(2, 5, 6)).count_nonzero() == 0
    assert any(name.endswith("bias") for name, _ in kind(6, 10, bias=True).named_parameters())


@both
def test_hidden_dropout_is_on_the_hidden_units(kind):
    module, seen = kind(6, 100, hidden_dropout=0.5), []
    module.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    module(torch.randn(2, 50, 6))
    assert 0.4 < (seen[0] == 0).double().mean() < 0.6
    assert (module.eval()(torch.randn(2, 50, 6)) != 0).all()


@both
def test_modules_can_be_pickled(kind):
    module, x = kind(6, 10), torch.randn(2, 6)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64])
@pytest.mark.parametrize("chunks", [1, 2, 5, 100])
def test_chunks_have_no_effect_on_numbers(n, chunks):
    module = FeedForward(6, 10).double()
    chunked, x = Chunked(module, chunks), torch.randn(2, n, 6, dtype=torch.float64, requires_grad=True)
    y = chunked(x)
    assert_close(y, module(x))
    for ours, plain in zip(gradients(chunked, x), gradients(module, x), strict=True):
        assert_close(ours, plain)


def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])


def test_chunks_draw_the_same_dropout_again():
    module, x = Chunked(FeedForward(6, 10, dropout=0.5), 3), torch.randn(2, 9, 6, requires_grad=True)
    y = module(x)
    (gradient,) = torch.autograd.grad(y.sum(), module.module.down_proj.bias)
    assert_close(gradient, 2 * (y != 0).sum((0, 1)).float())


def test_chunks_keep_one_piece_in_memory():
    """The module sees pieces, and what is saved for the backward pass does not hold the hidden units."""
    pieces: list[int] = []
    module = FeedForward(6, 1000)
    module.register_forward_pre_hook(lambda module, inputs: pieces.append(inputs[0].shape[-2]))
    saved = {chunks: saved_numbers(Chunked(module, chunks)) for chunks in (1, 4)}
    assert pieces == [40, 10, 10, 10, 10]
    assert saved[4] < 2 * 2 * 40 * 6 < 40 * 1000 < saved[1]


def saved_numbers(module: nn.Module) -> int:
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    sizes: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes.append(0 if x.data_ptr() in weights else x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module(torch.randn(2, 40, 6, requires_grad=True))
    return sum(sizes)


def test_there_is_at_least_one_chunk():
    with pytest.raises(ValueError, match="chunks must be a whole number of at least 1"):
        Chunked(FeedForward(6, 10), 0)
