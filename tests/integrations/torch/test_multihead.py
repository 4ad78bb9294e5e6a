"""With softmax inside, it is torch's own module, in every mode; and its weights are torch's, whatever is inside."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn import TorchMultiheadAttention, with_inner
from tests.integrations.torch.cases import (
    BATCH,
    DIM,
    HEADS,
    MASKS,
    SHAPES,
    M,
    N,
    causal_mask,
    inputs,
    pair,
    self_inputs,
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("unbatched", [False, True], ids=["batch", "alone"])
def test_softmax_is_torchs_in_every_mode(shape, mask, unbatched):
    theirs, mine = pair(options=SHAPES[shape])
    x, masks = inputs(SHAPES[shape], unbatched=unbatched), MASKS[mask](N, M, unbatched)
    for need_weights, average in itertools.product((True, False), (True, False)):
        options = {"need_weights": need_weights, "average_attn_weights": average}
        assert_close(mine(*x, **masks, **options), theirs(*x, **masks, **options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("hint", [False, True])
def test_softmax_is_torchs_when_causal(need_weights, padded, hint):
    theirs, mine = pair(options={"batch_first": True})
    x, masks = self_inputs(), {"attn_mask": causal_mask(N), "is_causal": hint, "need_weights": need_weights}
    if padded:
        masks["key_padding_mask"] = torch.arange(N).expand(BATCH, -1) >= torch.tensor([[N], [5], [1]])
    for attention in (theirs, mine):
        attention.eval()
    expected = theirs(x, x, x, **masks)
    assert_close(mine(x, x, x, **masks), expected, rtol=0, atol=1e-12)
    # torch wants the mask beside the hint; here the hint is enough
    alone = {name: value for name, value in masks.items() if name != "attn_mask"} | {"is_causal": True}
    assert_close(mine(x, x, x, **alone), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_softmax_drops_the_weights_that_torch_drops(need_weights):
    theirs, mine = pair(options={"dropout": 0.5, "batch_first": True})
    x, outputs = self_inputs(), []
    for attention in (theirs, mine):
        torch.manual_seed(1)
        outputs.append(attention(x, x, x, need_weights=need_weights))
    assert_close(*outputs, rtol=0, atol=1e-12)
    # and torch's fast path of evaluation drops nothing
    with torch.no_grad():
        assert_close(mine.eval()(x, x, x), theirs.eval()(x, x, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_has_torchs_gradients(shape):
    options = SHAPES[shape]
    results = []
    for attention in pair(options=options):
        torch.manual_seed(1)
        x = [t.requires_grad_() for t in inputs(options)]
        attention(*x, key_padding_mask=MASKS["bool keys"](N, M, False)["key_padding_mask"])[0].square().sum().backward()
        results.append([*(t.grad for t in x), *(p.grad for p in attention.parameters())])
    assert_close(*results, rtol=0, atol=1e-11)


def test_autocast_and_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        attention, x = TorchMultiheadAttention(DIM, HEADS, add_bias_kv=True, inner="elu"), torch.randn(5, 2, DIM)
        exact = attention(x, x, x)
        with torch.autocast("cpu", dtype=dtype):
            cast = attention(x, x, x)
        half = attention.to(dtype)(*[x.to(dtype)] * 3)
        for result in (cast, half):
            assert_close([t.float() for t in result], list(exact), rtol=0, atol=2e-2)


@pytest.mark.parametrize("need_weights", [True, False])
def test_large_products_are_finite_in_half_precision(need_weights):
    """Where q·k is larger than the largest number of float16, and q·k/√d is not."""
    theirs = nn.MultiheadAttention(64, 1, dtype=torch.float16)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.eye(64).repeat(3, 1))
    x = (36 * torch.randn(5, 2, 64)).half()
    found, expected = (each(x, x, x, need_weights=need_weights) for each in (with_inner(theirs, "softmax"), theirs))
    assert_close(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["softmax", "elu", "hedgehog", "favor", "linformer"])
def test_torchs_weights_load_strictly_and_what_is_new_stays(shape, name):
    theirs, mine = pair(name, options=SHAPES[shape])
    nn.init.normal_(theirs.out_proj.weight)
    # in a model and alone
    before = copy.deepcopy(mine.inner.state_dict())
    model, saved = nn.Sequential(mine), {f"0.{key}": x for key, x in theirs.state_dict().items()}
    keys = list(saved)
    model.load_state_dict(saved)
    assert list(saved) == keys
    assert_close(mine.inner.state_dict(), before, rtol=0, atol=0)
    assert_close(mine.out_proj.weight, theirs.out_proj.weight, rtol=0, atol=0)
    # what is ours is saved, and then it is not new any more: a part of it is not enough
    again = pair(name, options=SHAPES[shape], seed=5)[1]
    again.load_state_dict(mine.state_dict())
    assert_close(dict(again.state_dict()), dict(mine.state_dict()), rtol=0, atol=0)
    if name == "hedgehog":
        partial = {key: x for key, x in mine.state_dict().items() if "query_linear" not in key}
        with pytest.raises(RuntimeError, match="query_linear"):
            again.load_state_dict(partial)


def test_initial_weights_are_torchs_to_the_bit_and_may_be_drawn_anew():
    theirs, mine = pair("elu", options={"kdim": 5})
    assert_close(dict(mine.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    for attention in (theirs, mine):
        torch.manual_seed(3)
        attention._reset_parameters()
    assert_close(dict(mine.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
