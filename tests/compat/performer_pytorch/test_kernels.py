"""The walk-through's functions, against performer-pytorch's own."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from linattn.compat import performer_pytorch as ours
from tests import laws
from tests.compat.performer_pytorch.original import original

MATRIX = torch.randn(11, 5, dtype=torch.float64)
close = partial(assert_close, rtol=1e-10, atol=1e-12)


def data(n: int = 65) -> torch.Tensor:
    return torch.randn(2, 3, n, 5, dtype=torch.float64)


@pytest.mark.parametrize("is_query", [True, False])
@pytest.mark.parametrize("normalize_data", [True, False])
@pytest.mark.parametrize("eps", [1e-4, 0.5, 0.0])
def test_softmax_kernel(is_query, normalize_data, eps):
    options = dict(projection_matrix=MATRIX, is_query=is_query, normalize_data=normalize_data, eps=eps)
    x = data()
    close(ours.softmax_kernel(x, **options), original.softmax_kernel(x, **options))


@pytest.mark.parametrize("matrix", [MATRIX, None])
@pytest.mark.parametrize("normalize_data", [True, False])
@pytest.mark.parametrize("kernel", [torch.nn.ReLU(), torch.tanh])
def test_generalized_kernel(matrix, normalize_data, kernel):
    options = dict(projection_matrix=matrix, kernel_fn=kernel, kernel_epsilon=0.3, normalize_data=normalize_data)
    x = data()
    close(ours.generalized_kernel(x, **options), original.generalized_kernel(x, **options))


def test_their_defaults():
    x = data()
    for options in (dict(is_query=True), dict(is_query=False)):
        mine, theirs = (module.softmax_kernel(x, projection_matrix=MATRIX, **options) for module in (ours, original))
        close(mine, theirs)
    mine, theirs = (module.generalized_kernel(x, projection_matrix=MATRIX) for module in (ours, original))
    close(mine, theirs)


def test_features_are_made_on_the_device_that_is_named():
    on = dict(device="meta", projection_matrix=MATRIX)
    assert ours.softmax_kernel(data(), is_query=True, **on).device.type == "meta"
    assert ours.generalized_kernel(data(), **on).device.type == "meta"
    assert ours.gaussian_orthogonal_random_matrix(3, 2, device="meta").device.type == "meta"
    assert ours.orthogonal_matrix_chunk(3, device="meta").device.type == "meta"


@pytest.mark.parametrize("rows", [3, 8, 21])
@pytest.mark.parametrize("scaling", [0, 1])
def test_gaussian_orthogonal_random_matrix(rows, scaling):
    matrix = ours.gaussian_orthogonal_random_matrix(rows, 8, scaling=scaling)
    assert matrix.shape == original.gaussian_orthogonal_random_matrix(rows, 8, scaling=scaling).shape
    lengths = matrix.norm(dim=-1)
    for block in (matrix / lengths[:, None]).split(8):
        assert_close(block @ block.mT, torch.eye(len(block)), rtol=0, atol=1e-5)
    assert torch.equal(lengths.round(decimals=4) == 2.8284, torch.full((rows,), scaling == 1))


def test_a_scaling_that_is_none_is_refused():
    with pytest.raises(ValueError, match="scaling must be 0"):
        ours.gaussian_orthogonal_random_matrix(3, 2, scaling=2)


def test_orthogonal_matrix_chunk():
    chunk = ours.orthogonal_matrix_chunk(6)
    assert_close(chunk @ chunk.mT, torch.eye(6))


def test_linear_attention():
    q, k, v = laws.tokens(63, 65, positive=True)
    close(ours.linear_attention(q, k, v), original.linear_attention(q, k, v))


@pytest.mark.parametrize("n", [1, 64, 200])
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_causal_linear_attention(n, eps):
    q, k, v = laws.tokens(n, positive=True)
    theirs = original.causal_linear_attention_noncuda(q, k, v, eps=eps)
    close(ours.causal_linear_attention(q, k, v, eps=eps), theirs)
    for size in (1, 64, 128):
        close(ours.causal_linear_attention_noncuda(q, k, v, chunk_size=size, eps=eps), theirs)


def test_there_is_no_epsilon_unless_asked_for():
    """Theirs is 1e-6 in the denominator, so that small features give small outputs."""
    q, k, v = laws.tokens(20, positive=True)
    ones = torch.ones_like(v)
    assert original.causal_linear_attention_noncuda(1e-4 * q, 1e-4 * k, ones)[..., 0, :].max() < 0.995
    for attend in (ours.causal_linear_attention, ours.causal_linear_attention_noncuda):
        assert_close(attend(1e-4 * q, 1e-4 * k, ones), ones)


def test_pieces_are_of_chunk_size_tokens(monkeypatch):
    from linattn.ops import linear

    lengths, attend = [], linear.causal_linear_attention

    def spy(q, *rest):
        lengths.append(q.shape[-2])
        return attend(q, *rest)

    monkeypatch.setattr(linear, "causal_linear_attention", spy)
    ours.causal_linear_attention_noncuda(*laws.tokens(70, positive=True), chunk_size=32)
    assert lengths == [32, 32, 6]
    with pytest.raises(ValueError, match="at least 1"):
        ours.causal_linear_attention_noncuda(*laws.tokens(7), chunk_size=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x = data().to(dtype)
    exact = ours.softmax_kernel(x.double(), projection_matrix=MATRIX, is_query=True)
    actual = ours.softmax_kernel(x, projection_matrix=MATRIX, is_query=True)
    assert actual.dtype == dtype
    assert_close(actual.double(), exact, rtol=0.01, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("x", "matrix", "message"),
    [
        # whole numbers would round the features to 0 and 1
        (torch.ones(2, 3, 7, 5, dtype=torch.long), MATRIX, "data must be floating-point"),
        # a batch of one matrix would be a scale of its own
        (data(7), MATRIX[None], r"projection_matrix must be \(f, 5\), .* but is \(1, 11, 5\)"),
        (data(7), MATRIX[:, :3], r"projection_matrix must be \(f, 5\), .* but is \(11, 3\)"),
        (data(7)[0, 0, 0], MATRIX, r"data must be \(…, n, d\), but is \(5,\)"),
        ([1.0], MATRIX, "data must be a tensor, but is a list"),
        (data(7), [1.0], "projection_matrix must be a tensor, but is a list"),
    ],
    ids=["whole numbers", "batch of matrices", "width", "one vector", "list", "list of rows"],
)
def test_data_and_matrices_that_do_not_fit_are_refused(x, matrix, message):
    for kernel in (partial(ours.softmax_kernel, is_query=False), ours.generalized_kernel):
        with pytest.raises(ValueError, match=message):
            kernel(x, projection_matrix=matrix)


@pytest.mark.usefixtures("unchecked")
def test_a_softmax_kernel_needs_a_matrix():
    with pytest.raises(ValueError, match="projection_matrix must be a tensor, but is None"):
        ours.softmax_kernel(data(7), projection_matrix=None, is_query=True)


@pytest.mark.parametrize("is_query", [True, False])
def test_no_tokens_have_no_features(is_query):
    features = ours.softmax_kernel(data(0), projection_matrix=MATRIX, is_query=is_query)
    assert features.shape == (2, 3, 0, 11)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("attend", [ours.causal_linear_attention, ours.causal_linear_attention_noncuda])
def test_causal_attention_needs_as_many_keys_as_queries(attend, eps):
    q, k, v = laws.tokens(200)
    with pytest.raises(ValueError, match=r"a query for every key, but .* \(2, 3, 200, .*\) and .* \(2, 3, 9, .*\)"):
        attend(q, k[..., :9, :], v[..., :9, :], eps=eps)
    with pytest.raises(ValueError, match="k must be a tensor, but is None"):
        attend(q, None, v, eps=eps)
    with pytest.raises(ValueError, match="eps must be a finite number of at least 0, but is -1"):
        attend(q, k, v, eps=-1)
