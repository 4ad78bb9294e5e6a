"""The laws, over every attention that has a name."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.attention import InnerAttention, LinearAttention, RotaryLinearAttention, SplitHeads, map_state, traits
from tests import laws
from tests.attention.cases import (
    CAUSAL,
    CHANNELS,
    GLOBAL,
    HEADS,
    SPECS,
    WINDOW,
    GatesFromKeys,
    every_attention,
    every_causal,
    heads,
    make,
    over,
)
from tests.attention.definitions import define


def by_pieces(inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, cuts: list[int], key_mask: Tensor | None = None):
    """y and the last state, the tokens between one cut and the next at a time."""
    ys, state = [], None
    for start, stop in itertools.pairwise([0, *cuts, q.shape[-2]]):
        mask = None if key_mask is None else key_mask[..., start:stop]
        y, state = inner.extend(*(x[..., start:stop, :] for x in (q, k, v)), state, key_mask=mask)
        ys.append(y)
    return torch.cat(ys, -2), state


@every_attention
def test_agrees_with_the_definition(spec, causal):
    inner = make(spec, causal)
    for n in laws.LENGTHS:
        x = heads(n)
        assert_close(inner(*x), define(inner, *x))


@over(GLOBAL)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("n", "m"), [(3, 65), (65, 3), (1, 0)])
def test_queries_and_keys_may_differ_in_number(spec, causal, n, m):
    inner, x = make(spec, causal), heads(n, m)
    if traits(spec).cross:
        assert_close(inner(*x), define(inner, *x) if m else torch.zeros(2, 4, n, 6, dtype=torch.float64))
    else:
        with pytest.raises(ValueError, match=r"as many queries as keys|the same tokens"):
            inner(*x)


@every_attention
def test_a_masked_key_is_a_missing_key(spec, causal):
    inner, n = make(spec, causal), 100
    for key_mask in laws.masks(n).values():
        laws.a_masked_key_is_a_missing_key(inner, *heads(n), key_mask)


@every_attention
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf])
def test_what_is_masked_may_be_no_number(spec, causal, rubbish):
    """Outputs and gradients, of the weights too, are those with zeros in its place, of masked queries too if causal."""
    inner, key_mask = make(spec, causal), torch.cat([*laws.masks(40).values()])
    x, results = heads(40, b=len(key_mask)), []
    dy = torch.randn(len(key_mask), HEADS, 40, CHANNELS, dtype=torch.float64)
    for masked in (0.0, rubbish):
        q, k, v = (torch.where(key_mask.unsqueeze(-1), t, masked) for t in x)
        leaves = [t.requires_grad_() for t in (q if causal else torch.where(q.isfinite(), q, 0), k, v)]
        y = inner(*leaves, key_mask=key_mask)
        dq, *others = torch.autograd.grad(y, [*leaves, *inner.parameters()], dy, allow_unused=True)
        # what is replaced has no gradient, where zero itself may have one
        assert torch.isfinite(dq).all()
        results.append([y, torch.where(key_mask.unsqueeze(-1), dq, 0), *others])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert torch.isfinite(expected).all()
            assert_close(found, expected)


@every_causal
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf])
def test_what_is_masked_may_be_no_number_in_later_pieces(spec, rubbish):
    """The gradients that earlier pieces get through the state are numbers, too."""
    inner, key_mask, results = make(spec, True), torch.rand(2, 1, 12) < 0.6, []
    present, x = key_mask.unsqueeze(-1), heads(12)
    for masked in (0.0, rubbish):
        leaves = [torch.where(present, t, masked).requires_grad_() for t in x]
        ys, state = [], None
        for start, end in ((0, 5), (5, 6), (6, 12)):
            piece = (t[:, :, start:end] for t in leaves)
            y, state = inner.extend(*piece, state, key_mask=key_mask[..., start:end])
            ys.append(y)
        y = torch.where(present, torch.cat(ys, 2), 0)
        gradients = torch.autograd.grad(y.square().sum(), leaves)
        results.append([y, *(torch.where(present, g, 0) for g in gradients)])
        assert all(torch.isfinite(g).all() for g in gradients)
    assert_close(*results)


@every_causal
def test_a_masked_query_that_is_a_number_still_asks(spec):
    """Where linear attention gives masked tokens an output, it is that of their query."""
    inner, (q, k, v) = make(spec, True), heads(12)
    key_mask = torch.arange(12)[None, None] != 7
    y, other = (
        inner(q, k, v, key_mask=key_mask),
        inner(torch.where(key_mask.unsqueeze(-1), q, 1), k, v, key_mask=key_mask),
    )
    assert_close(y[..., :7, :], other[..., :7, :])
    if not y[..., 7, :].any():
        assert not other[..., 7, :].any()
    elif not isinstance(inner, SplitHeads):
        assert not torch.allclose(y[..., 7, :], other[..., 7, :])


@every_attention
def test_a_row_without_keys_has_zeros_and_gradients_that_are_numbers(spec, causal):
    inner, x = make(spec, causal), [t.requires_grad_() for t in heads(70)]
    key_mask = torch.ones(2, 1, 70, dtype=torch.bool)
    key_mask[0], key_mask[1, :, 20:50] = False, False
    y = inner(*x, key_mask=key_mask)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    y.sum().backward()
    for t in x:
        assert t.grad is not None and torch.isfinite(t.grad).all() and torch.equal(t.grad[0], torch.zeros_like(t[0]))


@every_attention
def test_nothing_gives_nothing(spec, causal):
    """No sequences, no tokens, or no channels of values, which a convolution of values has weights for."""
    inner = make(spec, causal)
    for b, n, dv in ((0, 5, CHANNELS), (2, 0, CHANNELS), (0, 0, CHANNELS), (2, 5, 0))[: 3 + (spec != "linformer_conv")]:
        q, k, v = heads(n, b=b)
        leaves = [x.requires_grad_() for x in (q, k, v[..., :dv])]
        for key_mask in (None, torch.ones(b, 1, n, dtype=torch.bool)):
            y = inner(*leaves, key_mask=key_mask)
            assert y.shape == (b, HEADS, n, dv)
            gradients = torch.autograd.grad(y.sum(), leaves, materialize_grads=True, allow_unused=True)
            assert not any(x.any() for x in gradients)


@every_attention
def test_a_mask_that_is_all_true_has_no_effect(spec, causal):
    inner, x = make(spec, causal), heads(90)
    assert_close(inner(*x, key_mask=torch.ones(1, 1, 90, dtype=torch.bool)), inner(*x))


@every_attention
def test_masks_may_differ_between_key_heads(spec, causal):
    inner, x = make(spec, causal), heads(80)
    key_mask = torch.rand(2, 2, 80) < 0.6
    y = inner(*x, key_mask=key_mask)
    for head in range(2):
        mask = key_mask[:, head : head + 1]
        queries = mask.repeat_interleave(2, 1)
        expected = define(inner, *x, key_mask=mask)[:, 2 * head : 2 * head + 2]
        assert_close(y[:, 2 * head : 2 * head + 2][queries], expected[queries])


@every_causal
@pytest.mark.parametrize("masked", [False, True])
def test_pieces_make_the_whole(spec, masked):
    inner, n = make(spec, True), 200
    key_mask = torch.cat([*laws.masks(n).values()]) if masked else None
    x = heads(n, b=2 if key_mask is None else len(key_mask))
    whole = inner(*x, key_mask=key_mask)
    for cuts in ([1, 66, 66, 67], [130], [0, 3, 40, 41, 199]):
        y, _ = by_pieces(inner, *x, cuts, key_mask)
        present = slice(None) if key_mask is None else key_mask[:, 0, :, None, None].expand(-1, n, 4, 6)
        assert_close(y.transpose(1, 2)[present], whole.transpose(1, 2)[present])


@every_causal
def test_one_token_at_a_time_makes_the_whole(spec):
    inner, x = make(spec, True, window=7), heads(40)
    assert_close(by_pieces(inner, *x, list(range(1, 40)))[0], inner(*x))


@every_causal
def test_prompts_of_different_lengths_continue_as_if_alone(spec):
    inner, (q, k, v) = make(spec, True, window=7), heads(60)
    for side in ("left", "right"):
        key_mask = laws.masks(60)[side]
        key_mask[..., 50:] = True if side == "left" else key_mask[..., 50:]
        _, state = by_pieces(inner, q, k, v, [30], key_mask)
        after = heads(9)
        y, _ = inner.extend(*after, state)
        for row, kept in enumerate(key_mask[:, 0]):
            one = slice(row, row + 1)
            before = [t[one, :, kept] for t in (q, k, v)]
            alone = inner(*(torch.cat([t, new[one]], -2) for t, new in zip(before, after, strict=True)))
            assert_close(y[one], alone[..., -9:, :])


@every_causal
def test_rows_of_a_state_can_be_reordered(spec):
    inner, x, after, order = make(spec, True), heads(40, b=3), heads(9, b=3), torch.tensor([2, 0, 0])
    _, state = inner.extend(*x)
    expected, _ = inner.extend(*after, state)
    y, _ = inner.extend(*(t[order] for t in after), map_state(lambda t: t[order], state))
    assert_close(y, expected[order])


@every_causal
def test_a_state_of_constant_size_unless_softmax(spec):
    inner = make(spec, True)
    _, early = inner.extend(*heads(50))
    _, late = inner.extend(*heads(150), early)
    sizes, alive = [], []
    for state in (early, late):
        held: list[Tensor] = []
        map_state(lambda t, held=held: held.append(t) or t, state)
        sizes.append(sum(t.nbytes for t in held))
        alive.append(sum(t.untyped_storage().nbytes() for t in held))
    assert sizes[0] > 0
    assert (sizes[0] == sizes[1]) == ("softmax" not in spec)
    if "softmax" not in spec:
        assert alive == sizes, "a view keeps a whole sequence alive"


@over(GLOBAL)
def test_the_causal_form_agrees_with_the_definition(spec, causal):
    """It is there unless the attention never can be causal, and shares the weights."""
    inner, x = make(spec, causal), heads(65)
    form = inner.as_causal()
    assert (form is not None) == traits(spec).causal
    if form is not None:
        assert form.causal and not inner.causal
        assert_close(form(*x), define(form, *x))
        assert [id(x) for x in form.parameters()] == [id(x) for x in inner.parameters()]


@every_causal
def test_the_past_does_not_see_the_future(spec):
    laws.the_past_does_not_see_the_future(make(spec, True), *heads(150), at=70)


@over(GLOBAL)
def test_what_is_not_causal_cannot_be_extended(spec, causal):
    with pytest.raises(NotImplementedError, match="not causal"):
        make(spec, causal).extend(*heads(3))


# learned features that cut off at zero may resemble nothing
@over([(spec, causal) for spec, causal in CAUSAL + GLOBAL if spec != "t2r"])
def test_the_last_token_sees_everything(spec, causal):
    q, k, v = (x.abs() for x in heads(WINDOW))
    laws.the_last_token_sees_everything(make(spec, causal), q, k, v)


@every_attention
def test_batch_elements_do_not_mix(spec, causal):
    laws.batch_elements_do_not_mix(make(spec, causal), *heads(70))


# what knows the places of keys, or projects them by their places, sees their order
@over([(spec, causal) for spec, causal in GLOBAL if traits(spec).cross and not traits(spec).fixed_length])
def test_keys_may_be_permuted(spec, causal):
    laws.keys_may_be_permuted(make(spec, causal), *heads(70))


def is_mean(inner: InnerAttention) -> bool:
    """Whether outputs are weighted means of values."""
    if isinstance(inner, SplitHeads):
        return all(map(is_mean, inner.parts))
    if isinstance(inner, (RotaryLinearAttention, GatesFromKeys)):
        return False
    return not (isinstance(inner, LinearAttention) and inner.normalize is None)


@over([(spec, causal) for spec, causal in CAUSAL + GLOBAL if spec not in ("linformer", "linformer_conv")])
def test_constant_values_come_back(spec, causal):
    inner, (q, k, v) = make(spec, causal), heads(70)
    y = inner(q.abs(), k.abs(), torch.full_like(v, 7.0))
    if is_mean(inner):
        # features that cut off at zero may leave a query without any key that it resembles
        nothing = define(inner, q.abs(), k.abs(), torch.ones_like(v)) == 0
        assert nothing.float().mean() < 0.2
        assert_close(y, torch.where(nothing, 0.0, 7.0).double())
    else:
        assert not torch.allclose(y, torch.full_like(y, 7.0))


@every_attention
def test_gradients(spec, causal):
    inner, x = make(spec, causal, window=3), [t.requires_grad_() for t in heads(7, b=1)]
    key_mask = torch.tensor([True, True, False, True, True, True, False])[None, None]
    assert torch.autograd.gradcheck(lambda *x: inner(*x), x, fast_mode=True)
    assert torch.autograd.gradcheck(lambda *x: inner(*x, key_mask=key_mask), x, fast_mode=True)


@every_attention
def test_gradients_agree_with_the_definition_over_many_blocks(spec, causal):
    inner, x = make(spec, causal), [t.requires_grad_() for t in heads(200)]
    dy = torch.randn(2, 4, 200, 6, dtype=torch.float64)
    actual = torch.autograd.grad(inner(*x), x, dy)
    assert_close(actual, torch.autograd.grad(define(inner, *x), x, dy))


@every_attention
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float64(spec, causal, dtype):
    # similarities of both signs would cancel in denominators
    inner, x = make(spec, causal).to(dtype), [(t / 2).abs().to(dtype).requires_grad_() for t in heads(200)]
    y = inner(*x)
    exact = inner.double()(*(t.double() for t in x))
    assert y.dtype == dtype
    assert (y - exact).abs().max() < 0.03 * exact.abs().max()
    y.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in x)


@every_attention
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_may_be_of_another_dtype_than_the_inputs(spec, causal, dtype):
    inner, x = make(spec, causal).float(), [(t / 2).abs().to(dtype) for t in heads(20)]
    y = inner(*x)
    exact = inner.double()(*(t.double() for t in x))
    assert y.dtype == dtype
    assert (y - exact).abs().max() < 0.03 * exact.abs().max()


@every_attention
def test_inputs_are_not_modified(spec, causal):
    laws.inputs_are_not_modified(make(spec, causal), *heads(70), key_mask=laws.masks(70)["holes"])


def test_what_cannot_be_causal_or_bidirectional_says_so():
    for spec in SPECS:
        if not traits(spec).causal:
            with pytest.raises(ValueError, match="cannot be causal"):
                make(spec, True)
        if not traits(spec).bidirectional:
            with pytest.raises(ValueError, match="causal only"):
                make(spec, False)
