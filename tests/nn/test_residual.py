"""The laws of residual and reversible stacks: gradients, what is saved, dropout, autocast, cross attention, pieces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.attention.named import named_attention
from linattn.nn import (
    Branch,
    Chunked,
    FeedForward,
    GatedFeedForward,
    MultiheadAttention,
    Projected,
    ResidualSequence,
    ReversibleSequence,
    TokenShift,
)

DIM, HEADS = 12, 2

Stack = ResidualSequence | ReversibleSequence


def attention(name: str, causal: bool, *, cross: bool = False, dropout: float = 0.0) -> Branch:
    inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, causal=causal, max_length=50, window=4)
    module = MultiheadAttention(DIM, HEADS, inner, context_dim=DIM if cross else None, dropout=dropout)
    shift = None if cross else TokenShift((1, 0) if causal else (1, 0, -1))
    return Branch(module, norm=nn.LayerNorm(DIM), shift=shift)


def pairs(depth: int, *, causal: bool = True, cross: bool = False, dropout: float = 0.0) -> list[tuple[Branch, Branch]]:
    made = []
    for layer in range(depth):
        feed = (FeedForward, GatedFeedForward)[layer % 2](DIM, 2 * DIM, dropout=dropout)
        made.append((attention("local:1+elu:1", causal, dropout=dropout), Branch(feed, norm=nn.LayerNorm(DIM))))
        if cross:
            feed = Branch(Chunked(FeedForward(DIM, 2 * DIM), 2), norm=nn.LayerNorm(DIM), rezero=True)
            made.append((attention("efficient", False, cross=True, dropout=dropout), feed))
    return made


def reversible(depth: int = 3, **options: Any) -> ReversibleSequence:
    return ReversibleSequence(pairs(depth, **options)).double()


def residual(depth: int = 3, **options: Any) -> ResidualSequence:
    return ResidualSequence(branch for pair in pairs(depth, **options) for branch in pair).double()


def plain(stack: ReversibleSequence, x: Tensor, **call: Any) -> Tensor:
    """The definition, differentiated by autograd."""
    x1, x2 = x, x
    for f, g in zip(stack.branches[::2], stack.branches[1::2], strict=True):
        x1 = x1 + f(x2, **call)
        x2 = x2 + g(x1, **call)
    return (x1 + x2) / 2 if stack.reduce == "mean" else x1 + x2


def some_inputs(n: int = 9, b: int = 2) -> Tensor:
    return torch.randn(b, n, DIM, dtype=torch.float64)


def gradients(function: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    return torch.autograd.grad(function().square().sum(), inputs)


def assert_gradients_agree(stack: ReversibleSequence, x: Tensor, **call: Any) -> None:
    inputs = [tensor for tensor in (x, call.get("context"), *stack.parameters()) if tensor is not None]
    inputs = [tensor for tensor in inputs if tensor.requires_grad]
    ours = gradients(lambda: stack(x, **call), inputs)
    expected = gradients(lambda: plain(stack, x, **call), inputs)
    for one, other in zip(ours, expected, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_agrees_with_the_definition(reduce):
    stack, x = ReversibleSequence(pairs(2), reduce=reduce).double(), some_inputs()
    assert_close(stack(x), plain(stack, x))
    with torch.no_grad():
        assert_close(stack(x), plain(stack, x))


def test_the_residual_sequence_agrees_with_the_definition():
    stack, x = residual(2), some_inputs()
    expected = x
    for branch in stack.branches:
        expected = expected + branch(expected)
    assert_close(stack(x), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_plain_autograds(training, masked, causal):
    stack, x = reversible(causal=causal, dropout=0.3).train(training), some_inputs().requires_grad_()
    assert_gradients_agree(stack, x, key_mask=torch.rand(2, 9) < 0.7 if masked else None)


@pytest.mark.parametrize("context_learns", [True, False])
def test_gradients_with_cross_attention_are_plain_autograds(context_learns):
    stack, x = reversible(2, cross=True, dropout=0.3), some_inputs().requires_grad_()
    context, mask = some_inputs(14).requires_grad_(context_learns), torch.rand(2, 14) < 0.7
    assert_gradients_agree(stack, x, context=context, context_mask=mask)


def test_weights_learn_where_the_input_does_not():
    stack, x = reversible(), some_inputs()
    assert stack(x).requires_grad
    assert_gradients_agree(stack, x)


def test_frozen_weights_stay_so():
    stack, x = reversible(), some_inputs().requires_grad_()
    stack.branches[2].requires_grad_(False)
    assert_gradients_agree(stack, x)
    stack.requires_grad_(False)
    assert_gradients_agree(stack, x)
    assert not stack(x.detach()).requires_grad


def test_a_module_may_stand_in_several_places():
    f, g = pairs(1)[0]
    stack, x = ReversibleSequence([(f, g), (f, g), (g, f)]).double(), some_inputs().requires_grad_()
    assert_gradients_agree(stack, x)


def test_gradients_touch_nothing_else():
    stack, x = reversible(), some_inputs()
    weight = next(stack.parameters())
    torch.autograd.grad(stack(x).sum(), weight)
    assert all(parameter.grad is None for parameter in stack.parameters())


def test_backward_adds_to_the_gradients():
    stack, x = reversible(), some_inputs()
    stack(x).sum().backward()
    once = [parameter.grad.clone() for parameter in stack.parameters()]
    stack(x).sum().backward()
    for parameter, first in zip(stack.parameters(), once, strict=True):
        assert_close(parameter.grad, 2 * first)


@pytest.mark.parametrize("kind", [ResidualSequence, ReversibleSequence])
def test_a_context_that_nothing_attends_to_is_refused(kind):
    layers = pairs(2)
    stack = kind(layers if kind is ReversibleSequence else [branch for pair in layers for branch in pair])
    for module in (stack, Projected(stack, DIM, DIM)):
        for call in (module, module.extend):
            with pytest.raises(ValueError, match="a context was given, but nothing attends to it"):
                call(some_inputs(), context=some_inputs(14))
            with pytest.raises(ValueError, match="context_mask is of a context, but none was given"):
                call(some_inputs(), context_mask=torch.ones(2, 14, dtype=torch.bool))


def test_the_context_is_differentiated_once():
    """However many layers read it."""
    stack, calls = reversible(4, cross=True), []
    encoder = nn.Linear(DIM, DIM).double()
    encoder.register_full_backward_hook(lambda *_: calls.append(1))
    stack(some_inputs(), context=encoder(some_inputs(14).requires_grad_())).sum().backward()
    assert calls == [1]


def test_the_backward_pass_leaves_randomness_as_it_was():
    stack, x = reversible(dropout=0.5), some_inputs().requires_grad_()
    torch.manual_seed(0)
    y = stack(x)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_modes_are_the_same_in_the_backward_pass(training, chunks):
    stack, x = reversible(dropout=0.5), some_inputs().requires_grad_()
    for branch in stack.branches[1::2]:
        branch.module = Chunked(branch.module, chunks)
    stack.train(training)
    # one part is in the other mode
    stack.branches[1].train(not training)
    inputs = [x, *stack.parameters()]
    expected = gradients(lambda: plain(stack, x), inputs)
    torch.manual_seed(3)
    y = stack(x)
    stack.train(not training)
    for one, other in zip(torch.autograd.grad(y.square().sum(), inputs), expected, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert all(module.training is not training for module in stack.modules())


def test_autocast_is_the_same_in_the_backward_pass():
    stack, seen = ReversibleSequence(pairs(2)), []
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    x = some_inputs().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = stack(x)
        expected = plain(stack, x)
    count = len(seen)
    inputs = [x, *stack.parameters()]
    ours = torch.autograd.grad(y.float().square().sum(), inputs)
    assert len(seen) > count and set(seen) == {torch.bfloat16}
    for one, other in zip(ours, torch.autograd.grad(expected.float().square().sum(), inputs), strict=True):
        assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))


def test_autocast_keeps_no_weights_without_gradients():
    """A weight that the stack and something else share is converted for both, and learns from both."""
    stack = ReversibleSequence(pairs(1))
    shared, x = stack.branches[1].module.up_proj, some_inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        stack(x)
        y = shared(x)
    assert y.requires_grad


@pytest.mark.parametrize("depth", [1, 8])
def test_what_is_saved_does_not_grow_with_depth(depth):
    stack, x = reversible(depth, dropout=0.1), some_inputs(40).requires_grad_()
    weights = {parameter.data_ptr() for parameter in stack.parameters()}
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(0 if tensor.data_ptr() in weights else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stack(x)
    assert sum(sizes) == 2 * x.numel()


def test_changed_weights_are_noticed():
    """Recomputed with other weights, gradients would be wrong in silence."""
    stack = reversible()
    y = stack(some_inputs())
    with torch.no_grad():
        next(stack.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("learns", [True, False])
def test_substituted_weights_are_refused(learns):
    """The backward pass would recompute with the weights of the module."""
    stack, x = reversible(), some_inputs().requires_grad_()
    weights = {name: (1.5 * weight.detach()).requires_grad_(learns) for name, weight in stack.named_parameters()}
    y = torch.func.functional_call(stack, weights, (x,))
    with pytest.raises(RuntimeError, match=r"other tensors now, as after torch\.func\.functional_call"):
        y.sum().backward()


def test_weights_that_were_frozen_in_between_are_refused():
    """The gradient of one would be that of another."""
    stack, x = reversible(), some_inputs().requires_grad_()
    norm = stack.branches[0].norm
    norm.weight.requires_grad_(False)
    y = stack(x)
    norm.weight.requires_grad_(True)
    norm.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"or requires_grad has changed: .* freeze before the forward pass"):
        y.sum().backward()


def test_second_derivatives_are_refused():
    stack, x = reversible(), some_inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("make", [residual, reversible])
@pytest.mark.parametrize("cross", [False, True])
def test_pieces_make_the_whole(make, cross):
    stack, x = make(2, cross=cross).eval(), some_inputs()
    context, mask = some_inputs(14), torch.rand(2, 14) < 0.7
    call = {"context": context, "context_mask": mask} if cross else {}
    key_mask = torch.rand(2, 9) < 0.7
    state, pieces = None, []
    for start, stop in ((0, 0), (0, 4), (4, 5), (5, 9)):
        here = {} if start else call
        y, state = stack.extend(x[:, start:stop], state, key_mask=key_mask[:, start:stop], **here)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1)[key_mask], stack(x, key_mask=key_mask, **call)[key_mask])


def test_no_branches_change_nothing():
    x = some_inputs()
    assert_close(ReversibleSequence([])(x), x)
    assert_close(ResidualSequence([])(x), x)


def test_what_is_not_known_is_refused(unchecked):
    with pytest.raises(ValueError, match="reduce must be one of mean, sum"):
        ReversibleSequence([], reduce="max")
    f, g = pairs(1)[0]
    for wrong, came in (((f,), "a tuple of 1"), ([f, g, f], "a list of 3"), (f, "a Branch")):
        with pytest.raises(ValueError, match=rf"pairs must be tuples of two branches, \(f, g\), but one is {came}"):
            ReversibleSequence([(f, g), wrong])
    for make in (lambda part: ResidualSequence([f, part]), lambda part: ReversibleSequence([(f, part)])):
        for part in (torch.nn.Identity(), 3, None):
            with pytest.raises(ValueError, match=r"branches\[1\] must be a Branch, but is"):
                make(part)
