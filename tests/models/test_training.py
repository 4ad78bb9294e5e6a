"""What training needs of a model beside its numbers."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linattn.models import LanguageModel, LanguageModelConfig
from tests.models.causal import (
    MODELS,
    OPTIONS,
    VOCABULARY,
    every_kind,
    every_model,
    every_steady_model,
    small_model,
    some_tokens,
)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["softmax", "taylor2", "favor", *OPTIONS])
def test_learns_a_sequence_by_heart(name):
    config = LanguageModelConfig(**({"vocab_size": VOCABULARY, "dim": 32, "depth": 2, "window": 7} | MODELS[name]))
    model, tokens = LanguageModel(config), some_tokens(2, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [loss_of(model, tokens)]
    while losses[-1] >= 1 and len(losses) <= 40:
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        losses.append(loss_of(model, tokens))
    assert 2 < losses[0] < 3.2 and losses[-1] < 1


@every_kind
def test_checkpointed_blocks_have_the_same_gradients(options):
    model, tokens = small_model(options).train(), some_tokens(2, 20)
    expected = gradients(model, tokens)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    found = gradients(model, tokens)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=0, atol=0, msg=name)


@every_steady_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_close_to_float64(options, dtype):
    exact, tokens = small_model(options), some_tokens(2, 40)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.mul_(0.3)
    model = copy.deepcopy(exact).float()
    with torch.autocast("cpu", dtype=dtype):
        logits = model(tokens)
        first, state = model.extend(tokens[:, :39])
        pieces = torch.cat([first, model.extend(tokens[:, 39:], state)[0]], 1)
    logits.float().square().mean().backward()
    expected = exact(tokens)
    for found in (logits, pieces):
        assert (found - expected).norm() < 0.03 * expected.norm()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@every_steady_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_models_may_have_other_dtypes(options, dtype):
    model, tokens = small_model(options), some_tokens(2, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    expected = model(tokens)
    model = model.to(dtype)
    first, state = model.extend(tokens[:, :39])
    second, _ = model.extend(tokens[:, 39:], state)
    tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5}[dtype] * expected.norm()
    for logits in (model(tokens), torch.cat([first, second], 1)):
        assert logits.dtype == dtype
        assert (logits - expected).norm() < tolerance


@every_model
def test_a_model_made_on_the_meta_device_is_complete_after_a_reset(options):
    config = LanguageModelConfig(**({"vocab_size": 200, "dim": 64, "depth": 2} | options))
    with torch.device("meta"):
        model = LanguageModel(config)
    # uninitialised memory is NaN here
    model.to_empty(device="cpu").reset_parameters()
    usual = LanguageModel(config).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
        if tensor.numel() > 500:
            assert_close(tensor.std(), usual[name].std(), rtol=0.15, atol=0, msg=name)
            assert_close(tensor.mean(), usual[name].mean(), rtol=0, atol=0.25 * usual[name].std().item(), msg=name)
        elif not torch.equal(usual[name], LanguageModel(config).state_dict()[name]):
            assert tensor.unique().numel() > 1, name
        else:
            assert_close(tensor, usual[name], msg=name)
    assert model(some_tokens(1, 9)).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_keys_begin_as_queries(device):
    config = LanguageModelConfig(**({"vocab_size": 200, "dim": 64, "depth": 2} | MODELS["induction"]))
    with torch.device(device):
        model = LanguageModel(config)
    if device == "meta":
        model.to_empty(device="cpu").reset_parameters()
    for block in model.blocks:
        assert torch.equal(block.mixer.k_proj.weight, block.mixer.q_proj.weight)
        assert block.mixer.q_proj.weight.std() > 0.01


@every_model
def test_copies_are_independent_and_equal(options):
    model, tokens = small_model(options), some_tokens(2, 20)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), model(tokens))
    with torch.no_grad():
        twin.embedding.weight.zero_()
    assert model.embedding.weight.count_nonzero() > 0


@every_model
def test_weights_are_all_there_is_to_keep(options):
    model, other, tokens = small_model(options), small_model(options), some_tokens(2, 20)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(tokens), model(tokens))


def test_tied_weights_are_one_parameter():
    model = small_model(MODELS["mixture"])
    assert "head.weight" not in model.state_dict() and "head.weight" in small_model(MODELS["untied"]).state_dict()
    tokens = some_tokens(1, 9)
    before = model.logits(torch.ones(1, 16).double())
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    assert_close(model.logits(torch.ones(1, 16).double()), 2 * before)
    assert model(tokens).shape == (1, 9, VOCABULARY)


@every_kind
def test_gradients_of_each_sample_by_vmap(options):
    model, tokens = small_model(options), some_tokens(3, 12)
    parameters = dict(model.named_parameters())

    def loss(parameters, row):
        return functional_call(model, parameters, (row.unsqueeze(0),)).square().mean()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, tokens)
    for row in range(3):
        alone = grad(loss)(parameters, tokens[row])
        for name, gradient in alone.items():
            assert_close(each[name][row], gradient, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@every_kind
def test_an_ensemble_by_vmap(options):
    models, tokens = [small_model(options) for _ in range(2)], some_tokens(2, 12)
    stacked, buffers = torch.func.stack_module_state(models)
    logits = vmap(lambda *weights: functional_call(models[0], weights, (tokens,)))(stacked, buffers)
    assert_close(logits, torch.stack([model(tokens) for model in models]), rtol=1e-9, atol=1e-9)
