"""Muon moves matrices of hidden layers along orthogonal matrices, and all other weights as AdamW does."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn import LanguageModel, LanguageModelConfig
from linattn.cli.trainer import RunTrainer
from linattn.console.muon import NEWTON_SCHULZ, Muon, language_model_groups, orthogonal

SHAPES = [(5, 9), (9, 5), (7, 7), (5, 9)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e12])
def test_directions_are_those_of_the_singular_value_decomposition(scale):
    for shape in SHAPES:
        matrices = torch.randn(3, *shape, dtype=torch.float64)
        u, sizes, v = torch.linalg.svd(matrices, full_matrices=False)
        found = u.mT @ orthogonal(scale * matrices) @ v.mT
        sizes = sizes / sizes.norm(dim=1, keepdim=True)
        is_large, (iterations, (a, b, c)) = sizes > 0.005, NEWTON_SCHULZ
        for _ in range(iterations):
            sizes = a * sizes + b * sizes**3 + c * sizes**5
        assert_close(found, sizes.diag_embed(), rtol=0, atol=1e-9)
        assert ((sizes > 0.65) & (sizes < 1.25))[is_large].all()


def test_a_matrix_whose_gradients_end_only_decays():
    """Its momentum fades to the smallest numbers that there are, which have no direction."""
    weight = nn.Parameter(torch.randn(4, 4))
    muon = Muon([{"params": [weight], "orthogonal": True}], lr=1e-3, weight_decay=0.1)
    for step in range(2_500):
        weight.grad = torch.randn(4, 4) if step < 3 else torch.zeros(4, 4)
        before = weight.detach().clone()
        muon.step()
        if step > 700:
            assert_close(weight.detach(), before * (1 - 1e-4), rtol=1e-6, atol=0)


def test_a_matrix_without_a_gradient_moves_nowhere():
    assert all((orthogonal(torch.zeros(2, *shape)) == 0).all() for shape in SHAPES)


@pytest.mark.parametrize("largest", [2**24, 50])
def test_matrices_take_the_steps_of_torchs_muon_and_other_weights_those_of_adamw(monkeypatch, largest):
    """torch's multiplies in bfloat16."""
    weights = [[nn.Parameter(torch.randn(shape)) for shape in (*SHAPES, (6,), (4, 3))] for _ in range(2)]
    with torch.no_grad():
        for ours, theirs in zip(*weights, strict=True):
            theirs.copy_(ours)
    (ours, theirs), options = weights, {"lr": 0.1, "weight_decay": 0.2}
    # 50 numbers are one matrix of 45 or 49
    monkeypatch.setattr("linattn.console.muon.LARGEST_STACK", largest)
    # each of two groups with a learning rate of its own
    muon = Muon(
        [
            {"params": ours[:2], "orthogonal": True},
            {"params": ours[2:4], "orthogonal": True, "lr": 0.05},
            {"params": ours[4:]},
        ],
        **options,
    )
    expected = [
        torch.optim.Muon(
            [{"params": theirs[:2]}, {"params": theirs[2:4], "lr": 0.05}], adjust_lr_fn="match_rms_adamw", **options
        ),
        torch.optim.AdamW(theirs[4:], **options),
    ]
    for _ in range(3):
        before = [weight.detach().clone() for weight in ours]
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        muon.step()
        for optimizer in expected:
            optimizer.step()
        for i, (mine, other, old) in enumerate(zip(ours, theirs, before, strict=True)):
            step = (other - old).norm()
            assert_close((mine - other).norm() / step, torch.tensor(0.0), rtol=0, atol=0.05 if i < 4 else 1e-6)
            with torch.no_grad():
                other.copy_(mine)


def test_matrices_are_multiplied_together_up_to_a_number_of_numbers(monkeypatch):
    counts = []
    monkeypatch.setattr("linattn.console.muon.LARGEST_STACK", 3 * 45)
    monkeypatch.setattr("linattn.console.muon.orthogonal", lambda x: counts.append(x.numel()) or x)
    weights = [nn.Parameter(torch.randn(shape)) for shape in (*[(5, 9)] * 7, *[(7, 7)] * 3, (20, 20))]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    Muon([{"params": weights, "orthogonal": True}], lr=0.1).step()
    # one matrix is taken, however large
    assert sorted(counts) == sorted([135, 135, 45, 98, 49, 400])


def test_hidden_matrices_are_those_of_linear_layers_in_the_stack_and_only_matrices_decay():
    stack = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(2, 4))
    model = nn.ModuleList([nn.Embedding(7, 3), stack, nn.Linear(4, 7, bias=False)])
    hidden, matrices, others = Muon(language_model_groups(model, stack), lr=0.1, weight_decay=0.2).param_groups
    assert [group["orthogonal"] for group in (hidden, matrices, others)] == [True, False, False]
    assert hidden["params"] == [stack[0].weight] and hidden["weight_decay"] == matrices["weight_decay"] == 0.2
    assert {id(x) for x in matrices["params"]} == {id(x) for x in (model[0].weight, stack[2].weight, model[2].weight)}
    assert {id(x) for x in others["params"]} == {id(x) for x in (stack[0].bias, stack[1].weight, stack[1].bias)}
    assert others["weight_decay"] == 0


def test_only_matrices_decay_with_adamw_too():
    """Not the logarithms of decays either, which Trainer's own rule takes for matrices by their names."""
    model = LanguageModel(LanguageModelConfig(vocab_size=7, dim=8, depth=1, num_heads=2, attention="gated_delta"))
    names = RunTrainer.get_decay_parameter_names(cast(Any, None), model)
    assert set(names) == {name for name, weight in model.named_parameters() if weight.ndim == 2}
    assert "blocks.0.mixer.gates.decay.A_log" in dict(model.named_parameters())
