import pytest
import torch
from torch.testing import assert_close

from linattn.attention import LocalAttention
from tests.attention.definitions import define

KINDS = [(causal, bucketed) for causal in (False, True) for bucketed in (False, True)]
every_kind = pytest.mark.parametrize(("causal", "bucketed"), KINDS)


def keys_seen(inner: LocalAttention, n: int) -> list[list[int]]:
    """With values of one-hot places, the outputs tell which keys each query sees."""
    q, k = torch.randn(2, 1, 1, n, 4, dtype=torch.float64)
    y = inner(q, k, torch.eye(n, dtype=torch.float64)[None, None])
    return [row.nonzero()[:, 0].tolist() for row in y[0, 0]]


def test_which_keys_are_seen():
    assert keys_seen(LocalAttention(3, causal=True), 6)[4] == [2, 3, 4]
    assert keys_seen(LocalAttention(3), 6)[3] == [1, 2, 3, 4, 5]
    assert keys_seen(LocalAttention(3, causal=True, bucketed=True), 12)[6:9] == [
        [3, 4, 5, 6],
        [3, 4, 5, 6, 7],
        [3, 4, 5, 6, 7, 8],
    ]
    assert keys_seen(LocalAttention(2, bucketed=True), 8)[4] == [2, 3, 4, 5, 6, 7]


@every_kind
@pytest.mark.parametrize("window", [1, 2, 16, 64, 65, 130, 1000])
def test_any_window_and_length_agrees_with_the_definition(causal, bucketed, window):
    inner = LocalAttention(window, causal=causal, bucketed=bucketed)
    for n in (1, 2, 64, 129, 200, 333):
        # more channels in values than in keys, and fewer
        for d, dv in ((3, 5), (5, 3)):
            x = [torch.randn(1, *shape, dtype=torch.float64) for shape in ((4, n, d), (2, n, d), (2, n, dv))]
            assert_close(inner(*x), define(inner, *x))


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("window", [1, 5, 64, 70])
def test_long_pieces_after_a_past_of_another_length_in_each_row(bucketed, window):
    inner, n = LocalAttention(window, causal=True, bucketed=bucketed), 420
    x = [torch.randn(3, 2, n, 4, dtype=torch.float64) for _ in range(3)]
    key_mask = torch.arange(n) >= torch.tensor([0, 17, 95])[:, None, None]
    key_mask[1, :, 200:230] = False
    ys, state = [], None
    for piece in (slice(0, 100), slice(100, 400), slice(400, 401), slice(401, 420)):
        y, state = inner.extend(*(t[..., piece, :] for t in x), state, key_mask=key_mask[..., piece])
        ys.append(y)
    assert_close(torch.cat(ys, -2), define(inner, *x, key_mask=key_mask))


@every_kind
def test_values_of_one_come_back_as_one_at_any_length(causal, bucketed):
    # a package attends to its own padding: 0.62 to 0.83 here
    q, k = torch.randn(2, 1, 1, 40, 16)
    y = LocalAttention(32, causal=causal, bucketed=bucketed)(q, k, torch.ones(1, 1, 40, 16))
    assert_close(y, torch.ones_like(y))


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_the_length(causal):
    """What is saved for backward, beside inputs and output, is a few numbers a token: no n × window matrix."""
    saved: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    n, window = 4096, 64
    x = [torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        LocalAttention(window, causal=causal)(*x)
    assert 0 < sum(saved.values()) < 6 * x[0].nbytes


def test_errors_say_what_came():
    with pytest.raises(ValueError, match="window must be a whole number of at least 1, but is 0"):
        LocalAttention(0)
    with pytest.raises(ValueError, match="there are 3 and 5"):
        LocalAttention(2)(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4))
