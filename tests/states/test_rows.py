"""Rows of states: what is joined equals what is read alone, whatever was read before and by which model."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from linattn import LinearAttention, LinearState, named_attention, states
from linattn.compat.linear_attention_transformer.axial import AxialAttention
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from linattn.compat.performer_pytorch.floored_favor import FlooredFavorAttention
from linattn.feature_maps import FavorFeatureMap
from linattn.ops.nested import batch_size, map_state
from tests.models.causal import every_kind, small_model, some_tokens

LENGTHS = (11, 1, 8)


def tensors(state):
    found = []
    map_state(found.append, state)
    return found


def assert_same(first, second, **tolerances):
    pairs = zip(tensors(first), tensors(second), strict=True)
    for x, y in pairs:
        assert_close(x, y, **tolerances)


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def alone(model, texts):
    return [model.extend(text)[1] for text in texts]


@every_kind
def test_joined_rows_go_on_as_each_does_alone(options):
    """Rows that have read different numbers of tokens, windows not yet full, in any order and as often as wanted."""
    model, texts, more = small_model(options), [some_tokens(1, n) for n in LENGTHS], some_tokens(3, 9)
    made = alone(model, texts)
    joined = states.concatenate(made)
    assert states.count_rows(joined) == 3
    y, later = model.extend(more, joined)
    for i, state in enumerate(made):
        own, own_later = model.extend(more[i : i + 1], state)
        assert_close(y[i : i + 1], own)
        assert_close(model.extend(more[:1], states.select(later, [i]))[0], model.extend(more[:1], own_later)[0])
    order = [2, 0, 2]
    assert_close(
        model.extend(more, states.select(joined, order))[0],
        model.extend(more, states.concatenate([made[i] for i in order]))[0],
    )
    assert_same(states.select(joined, slice(1, None)), states.select(joined, [1, 2]))


@every_kind
def test_joining_what_was_selected_changes_nothing(options):
    state = small_model(options).extend(some_tokens(3, 10))[1]
    rows = [states.select(state, [i]) for i in range(3)]
    assert_same(states.concatenate(rows), state, rtol=0, atol=0)
    assert sum(map(states.num_bytes, rows)) == states.num_bytes(state)


@every_kind
def test_forks_are_independent(options):
    model = small_model(options)
    state = model.extend(some_tokens(1, 10))[1]
    before = map_state(torch.clone, state)
    forks, more = states.repeat(state, 3), some_tokens(3, 5)
    y = model.extend(more, forks)[0]
    for i in range(3):
        assert_close(y[i : i + 1], model.extend(more[i : i + 1], state)[0])
    assert_same(state, before, rtol=0, atol=0)
    pairs = states.repeat(states.concatenate([state, state]), 2)
    assert_same(pairs, states.repeat(state, 4), rtol=0, atol=0)


@every_kind
@pytest.mark.parametrize("dtype", states.compression.COMPACT, ids=str)
def test_a_compressed_state_is_small_and_near(options, dtype):
    model = small_model(options).float()
    state = model.extend(some_tokens(2, 10))[1]
    small = states.compress(state, dtype)
    assert states.num_bytes(small) < states.num_bytes(state)
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.int8: 1 / 254}[dtype]
    for x, y in zip(tensors(state), tensors(states.restore(small)), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if x.is_floating_point() and x.numel():
            finite = x.isfinite()
            assert torch.equal(y[~finite], x[~finite])
            error = torch.where(finite, x - y, 0).abs()
            assert (error <= 1.01 * step * torch.where(finite, x, 0).abs().amax(-1, keepdim=True)).all()
        else:
            assert torch.equal(x, y)
    rows = states.concatenate([states.select(small, [1]), states.select(small, [0])])
    assert_same(states.restore(rows), states.select(states.restore(small), [1, 0]), rtol=0, atol=0)
    y, _ = model.extend(some_tokens(2, 3), states.restore(small))
    assert y.isfinite().all()


@every_kind
@pytest.mark.parametrize("dtype", states.compression.COMPACT, ids=str)
def test_compressed_rows_are_joined_where_one_has_numbers_that_do_not_fit(options, dtype):
    """As the scale of a state of no tokens does not."""
    model = small_model(options).float()
    small = [states.compress(model.extend(some_tokens(1, n))[1], dtype) for n in (0, 9)]
    joined = states.concatenate([states.restore(each) for each in small])
    assert_same(states.restore(states.concatenate(small)), joined, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", states.compression.COMPACT, ids=str)
@pytest.mark.parametrize("size", [1e-37, 1e-12, 1e-8, 1e-6, 1e-4, 1.0, 1e4, 1e8])
def test_a_compressed_state_is_near_at_any_size(size, dtype):
    """Where some vectors have faded, and others not."""
    faded, fresh = (LinearState(each * torch.randn(2, 4, 16), each * torch.randn(2, 4)) for each in (size, 1.0))
    check_near(states.concatenate([faded, fresh]), dtype)


@pytest.mark.parametrize("dtype", states.compression.COMPACT, ids=str)
@pytest.mark.parametrize("size", [1e-60, 1e45])
def test_a_compressed_state_is_near_beyond_the_range_of_its_scale(size, dtype):
    check_near((size * torch.randn(2, 4, 16).double(), torch.zeros(2, 4, 16).double()), dtype)


def check_near(state, dtype):
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.int8: 1 / 254}[dtype]
    for x, y in zip(tensors(state), tensors(states.restore(states.compress(state, dtype))), strict=True):
        assert ((x - y).abs() <= 1.01 * step * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", states.compression.COMPACT, ids=str)
def test_a_compressed_state_has_the_dtype_that_it_is_given(dtype):
    small = states.compress(linear(2), dtype)
    assert_same(states.to(small, dtype=torch.float64), states.to(states.restore(small), dtype=torch.float64))
    assert_same(states.to(small, device="cpu"), small, rtol=0, atol=0)


@every_kind
def test_a_detached_state_has_no_history(options):
    with torch.enable_grad():
        state = small_model(options).extend(some_tokens(1, 5))[1]
        assert any(x.requires_grad for x in tensors(state))
        assert not any(x.requires_grad for x in tensors(states.detach(state)))


def test_another_dtype_and_device():
    model = small_model({"attention": "gla"})
    state = model.extend(some_tokens(2, 5))[1]
    single = states.to(state, dtype=torch.float32, device="cpu")
    assert {x.dtype for x in tensors(single)} == {torch.float32, torch.int64}
    assert model.float().extend(some_tokens(2, 3), single)[0].dtype == torch.float32
    assert {x.device.type for x in tensors(states.to(state, device="meta"))} == {"meta"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlindspotAttention(LinearAttention(FavorFeatureMap(4), causal=True), 4),
        lambda: AxialAttention(named_attention("elu", num_heads=2, head_dim=4, causal=True), 3),
        lambda: FlooredFavorAttention(FavorFeatureMap(4), epsilon=1e-3, causal=True),
    ],
    ids=["blindspot", "axial", "floored"],
)
def test_joined_rows_of_attentions_of_other_packages(make):
    torch.manual_seed(0)
    attention = make().double()

    def inputs(b, n):
        return torch.randn(3, b, 2, n, 4, dtype=torch.float64)

    made, more = [attention.extend(*inputs(1, n))[1] for n in LENGTHS], inputs(3, 9)
    y, later = attention.extend(*more, states.concatenate(made))
    again, _ = attention.extend(*more, later)
    for i, state in enumerate(made):
        own, own_later = attention.extend(*more[:, i : i + 1], state)
        assert_close(y[i : i + 1], own)
        assert_close(again[i : i + 1], attention.extend(*more[:, i : i + 1], own_later)[0])


def linear(b, f=4):
    return LinearState(torch.zeros(b, f, 3), torch.zeros(b, f))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: states.concatenate([]), "no state"),
        (lambda: states.concatenate([linear(1), linear(1, 5)]), r"state.S is \(b, 4, 3\).* and \(b, 5, 3\)"),
        (lambda: states.concatenate([linear(1), (linear(1),)]), "LinearState and tuple"),
        (lambda: states.concatenate([(linear(1),), (linear(1), linear(1))]), "1 and 2 parts"),
        (lambda: states.concatenate([(linear(1), 3), (linear(1), 4)]), "state.1 must be the same.* 3 and 4"),
        (lambda: states.concatenate([linear(1), states.to(linear(1), dtype=torch.float64)]), "float32.*float64"),
        (lambda: states.select(linear(2), [2]), "rows 0 to 1"),
        (lambda: states.select(linear(2), [-1]), "rows 0 to 1"),
        (lambda: states.select(linear(2), torch.tensor([0.5])), "whole numbers"),
        (lambda: states.select(linear(2), torch.tensor([[0]])), "whole numbers"),
        (lambda: states.select(linear(2), 1), "rows must be whole numbers in one dimension or a slice, but are 1"),
        (lambda: states.select(linear(2), torch.tensor(1)), "whole numbers in one dimension"),
        (lambda: states.select(linear(2), "01"), "whole numbers in one dimension or a slice, but are '01'"),
        (lambda: states.select(linear(2), None), "whole numbers in one dimension or a slice, but are None"),
        (lambda: states.repeat(linear(2), 0), "times must be a whole number of at least 1"),
        (lambda: states.repeat(linear(2), True), "times must be a whole number of at least 1"),
        (lambda: states.repeat(None, 2), "NoneType"),
        (lambda: states.count_rows({}), "dict"),
        (lambda: states.concatenate(iter([linear(1)])), "states must be a Sequence"),
        (lambda: states.compress([linear(1)]), "a tensor or nested tuples of tensors, but this is a list"),
        (lambda: states.restore([linear(1)]), "a tensor or nested tuples of tensors, but this is a list"),
        (lambda: states.detach([linear(1)]), "a tensor or nested tuples of tensors, but this is a list"),
        (lambda: states.to([linear(1)], device="cpu"), "a tensor or nested tuples of tensors, but this is a list"),
        (lambda: states.num_bytes([linear(1)]), "a tensor or nested tuples of tensors, but this is a list"),
        (lambda: states.to(linear(1), dtype=torch.int8), "compress"),
        (lambda: states.to(linear(1), dtype="float64"), "dtype is float64"),
        (lambda: states.compress(linear(1), torch.int32), "bfloat16, float16, int8"),
        (lambda: states.PrefixCache(small_model({"attention": "elu"}), dtype=torch.float32), "bfloat16, float16, int8"),
    ],
)
def test_what_cannot_be_done_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("unchecked")
def test_a_number_of_numpy_is_a_number():
    for rows in (1, 2):
        state = linear(rows)
        assert_same(states.repeat(state, np.int64(3)), states.repeat(state, 3), rtol=0, atol=0)


def test_no_rows_are_a_state_too():
    assert batch_size(states.select(linear(2), [])) == 0


def test_hidden_keys_of_rows_that_are_left_out_are_left_out():
    model = small_model({"attention": "softmax"})
    made = alone(model, [some_tokens(1, n) for n in LENGTHS])
    joined = states.concatenate(made)
    for i, state in enumerate(made):
        assert_same(states.select(joined, [i]), state, rtol=0, atol=0)
    small = states.select(states.compress(joined, torch.int8), [1])
    assert_same(small, states.compress(made[1], torch.int8), rtol=0, atol=0)
