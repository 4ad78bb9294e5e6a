import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.attention.named import named_attention
from linattn.nn import Branch, FeedForward, MultiheadAttention, TokenShift

DIM, HEADS = 12, 2


def some_inputs(n: int = 9, b: int = 2) -> torch.Tensor:
    return torch.randn(b, n, DIM, dtype=torch.float64)


def attention(name: str = "elu", *, causal: bool = False, cross: bool = False) -> MultiheadAttention:
    inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, causal=causal, max_length=50, window=4)
    return MultiheadAttention(DIM, HEADS, inner, context_dim=DIM if cross else None)


def test_is_the_module_of_the_shifted_norm_times_g():
    module, norm, shift = attention(causal=True), nn.LayerNorm(DIM), TokenShift((1, 0))
    branch, x = Branch(module, norm=norm, shift=shift, rezero=True).double(), some_inputs()
    mask = torch.rand(2, 9) < 0.6
    nn.init.constant_(branch.g, 0.7)
    expected = 0.7 * module(shift(norm(x), key_mask=mask), key_mask=mask)
    assert_close(branch(x, key_mask=mask), expected)


def test_rezero_starts_near_zero_and_learns():
    branch = Branch(FeedForward(DIM, 8), rezero=True).double()
    y = branch(some_inputs())
    assert 0 < y.abs().max() < 0.01
    y.square().sum().backward()
    assert all(parameter.grad.count_nonzero() for parameter in branch.parameters())


def test_a_feed_forward_keeps_nothing():
    branch, x = Branch(FeedForward(DIM, 8), norm=nn.LayerNorm(DIM)).double(), some_inputs()
    y, state = branch.extend(x, key_mask=torch.rand(2, 9) < 0.5)
    assert_close(y, branch(x))
    assert state == (None, None)


def test_a_sequential_is_a_function_of_each_token():
    """nn.Sequential has an `extend`, which adds parts to it."""
    module = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, DIM))
    branch, x, mask = Branch(module).double(), some_inputs(), torch.rand(2, 9) < 0.5
    assert_close(branch(x, key_mask=mask), module(x))
    y, state = branch.extend(x, key_mask=mask)
    assert_close(y, module(x))
    assert state == (None, None)


@pytest.mark.parametrize("name", ["softmax", "elu", "efficient", "taylor", "hedgehog", "linformer", "elu:1+softmax:1"])
def test_cross_attention_needs_its_context_once(name):
    branch = Branch(attention(name, cross=True), norm=nn.LayerNorm(DIM)).double()
    x, context, mask = some_inputs(), some_inputs(n=17), torch.rand(2, 17) < 0.6
    whole = branch(x, context=context, context_mask=mask)
    first, state = branch.extend(x[:, :0], context=context, context_mask=mask)
    second, state = branch.extend(x[:, :5], state)
    third, _ = branch.extend(x[:, 5:], state)
    assert_close(torch.cat([first, second, third], 1), whole)


def test_the_summary_of_linear_attention_does_not_grow():
    branch, sizes = Branch(attention("efficient", cross=True)).double(), set()
    for m in (3, 300):
        _, state = branch.extend(some_inputs(), context=some_inputs(m))
        sizes.add(tuple(tensor.shape for tensor in (state.module.sums.S, state.module.sums.z)))
    assert len(sizes) == 1


def test_cross_attention_without_a_context_is_refused():
    branch = Branch(attention(cross=True)).double()
    for call in (branch, branch.extend):
        with pytest.raises(ValueError, match="needs its context"):
            call(some_inputs())


def test_pieces_make_the_whole():
    branch = Branch(attention("local:1+elu:1", causal=True), norm=nn.LayerNorm(DIM), shift=TokenShift((1, 0))).double()
    x, mask = some_inputs(), torch.rand(2, 9) < 0.6
    first, state = branch.extend(x[:, :4], key_mask=mask[:, :4])
    second, _ = branch.extend(x[:, 4:], state, key_mask=mask[:, 4:])
    assert_close(torch.cat([first, second], 1)[mask], branch(x, key_mask=mask)[mask])
