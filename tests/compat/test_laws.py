"""The laws, over every constructor that we replace, in training and evaluation."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.nn import ReversibleSequence, residual, reversal
from tests.compat.constructors import VOCABULARY, Constructor, every_causal_constructor, every_constructor

in_training_too = pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])


def built(row: Constructor, training: bool = False) -> nn.Module:
    return row.build().double().train(training)


def padded(n: int, where: str) -> Tensor:
    places, counts = torch.arange(n), torch.tensor([[n - 4], [1], [n // 2]])
    holes = torch.rand(3, n) < 0.6
    return {"left": places >= n - counts, "right": places < counts, "holes": holes}[where]


@every_constructor
@pytest.mark.parametrize(("where", "training"), [("left", False), ("right", True), ("holes", False)])
def test_padding_has_no_effect(row, where, training):
    """Whatever tokens stand there. Compared with each row alone, without its padding."""
    model, x, mask, context = built(row, training), row.inputs(3, 29), padded(29, where), row.context(3)
    y = row.call(model, torch.where(mask if row.takes_tokens else mask.unsqueeze(-1), x, -3), mask, **context)
    for i in range(3):
        alone = {name: tensor[i : i + 1] for name, tensor in context.items()}
        assert_close(y[i, mask[i]], row.call(model, x[i : i + 1, mask[i]], None, **alone)[0])


@every_constructor
def test_padding_of_the_context_has_no_effect(row):
    model, x, context = built(row), row.inputs(3, 12), row.context(3)
    if not context:
        return
    rubbish = torch.where(context["context_mask"].unsqueeze(-1), context["context"], 1e6)
    y = row.call(model, x, None, context=rubbish, context_mask=context["context_mask"])
    for i in range(3):
        kept = context["context"][i, context["context_mask"][i]].unsqueeze(0)
        assert_close(y[i], row.call(model, x[i : i + 1], None, context=kept)[0])


# in evaluation, each row alone is compared above
@every_constructor
def test_batch_elements_do_not_mix(row):
    model, x, context = built(row, training=True), row.inputs(3, 21), row.context(3)
    together = row.call(model, x, None, **context)
    for i in range(3):
        alone = {name: tensor[i : i + 1] for name, tensor in context.items()}
        assert_close(row.call(model, x[i : i + 1], None, **alone)[0], together[i])


@every_causal_constructor
@pytest.mark.parametrize(("at", "training"), [(1, True), (13, False)])
def test_the_past_does_not_see_the_future(row, at, training):
    model, x, context = built(row, training), row.inputs(2, 30), row.context(2)
    later = (x[:, at:] + 1) % VOCABULARY if row.takes_tokens else 100 * torch.rand_like(x[:, at:])
    before, after = (row.call(model, tokens, None, **context) for tokens in (x, torch.cat([x[:, :at], later], 1)))
    assert_close(after[:, :at], before[:, :at], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[:, at:], before[:, at:])


@every_causal_constructor
@in_training_too
def test_pieces_make_the_whole(row, training):
    """The context is given once."""
    model, x, context = built(row, training), row.inputs(2, 29), row.context(2)
    state, pieces = None, []
    for start, stop in ((0, 0), (0, 11), (11, 12), (12, 13), (13, 29)):
        y, state = row.extend(model, x[:, start:stop], state, None, **({} if stop else context))
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), row.call(model, x, None, **context))


@every_causal_constructor
@pytest.mark.parametrize("where", ["right", "holes"])
def test_padded_pieces_make_the_whole(row, where):
    """Rows that are of different lengths when they go on."""
    model, x, mask, context = built(row), row.inputs(3, 29), padded(29, where), row.context(3)
    new = row.inputs(3, 5)
    state, pieces = None, []
    for start, stop in ((0, 0), (0, 11), (11, 29)):
        y, state = row.extend(model, x[:, start:stop], state, mask[:, start:stop], **({} if stop else context))
        pieces.append(y)
    pieces += [row.extend(model, new, state)[0]]
    y = torch.cat(pieces, 1)
    every = torch.cat([mask, torch.ones(3, 5, dtype=torch.bool)], 1)
    assert_close(y[every], row.call(model, torch.cat([x, new], 1), every, **context)[every])


@every_constructor
@in_training_too
def test_reversible_gradients_are_plain_ones(row, training, monkeypatch):
    model, x, mask, context = built(row, training), row.inputs(3, 20), padded(20, "right"), row.context(3)
    if not any(isinstance(module, ReversibleSequence) for module in model.modules()):
        return
    parameters = list(model.parameters())

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(row.call(model, x, mask, **context)[mask].square().sum(), parameters)

    ours = gradients()
    monkeypatch.setattr(residual, "run_reversibly", plainly)
    for one, other in zip(ours, gradients(), strict=True):
        assert_close(one, other, rtol=1e-8, atol=1e-8)


def plainly(branches: list[nn.Module], x: Tensor, call: reversal.Call) -> tuple[Tensor, Tensor]:
    first, second = x, x
    for branch in branches:
        first, second = second, first + branch(second, **call._asdict())
    return first, second


@every_constructor
def test_every_parameter_learns(row):
    model, x, context = built(row, training=True), row.inputs(2, 40), row.context(2)
    row.call(model, x, None, **context).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.count_nonzero() > 0, name


@every_constructor
def test_a_forward_changes_nothing(row):
    """Neither its inputs nor the model nor the caller's randomness."""
    model, x, mask, context = built(row), row.inputs(3, 20), padded(20, "holes"), row.context(3)
    kept = [tensor.clone() for tensor in (x, mask, *context.values(), *model.state_dict().values())]
    state = torch.get_rng_state()
    y = row.call(model, x, mask, **context)
    assert torch.equal(torch.get_rng_state(), state)
    for tensor, copied in zip((x, mask, *context.values(), *model.state_dict().values()), kept, strict=True):
        assert torch.equal(tensor, copied)
    assert torch.equal(row.call(model, x, mask, **context), y)


@every_constructor
def test_models_can_be_copied_and_pickled(row):
    model, x, context = built(row), row.inputs(2, 12), row.context(2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(row.call(twin, x, None, **context), row.call(model, x, None, **context))


@every_constructor
def test_any_length(row):
    model, context = built(row), row.context(2)
    for n in (1, 2, 7, 8, 9, 63):
        y = row.call(model, row.inputs(2, n), None, **context)
        assert y.shape[:2] == (2, n) and torch.isfinite(y).all()


@every_constructor
def test_half_precision_is_near(row):
    model, x, context = built(row), row.inputs(2, 20), row.context(2)
    exact = row.call(model, x, None, **context)
    for dtype, tolerance in ((torch.bfloat16, 0.06), (torch.float16, 0.01)):
        halved = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in context.items()}
        y = row.call(copy.deepcopy(model).to(dtype), x if row.takes_tokens else x.to(dtype), None, **halved)
        assert (y.double() - exact).norm() / exact.norm() < tolerance


@every_constructor
def test_misspelt_arguments_are_refused(row):
    model, x = built(row), row.inputs(2, 12)
    wrong: dict[str, Any] = {"inputs_mask": torch.ones(2, 12, dtype=torch.bool)}
    with pytest.raises(TypeError, match="inputs_mask"):
        model(*row.arguments(x), **wrong, **row.context(2))
