"""No channels, no values, no tokens, no sequences: what the definition gives, in outputs, states and gradients."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, linear_attention, read, summarize

# batch of q, batch of k, tokens, channels, channels of values
EMPTY = [
    (2, 2, 4, 0, 3),
    (2, 2, 4, 5, 0),
    (2, 2, 4, 0, 0),
    (2, 2, 0, 5, 3),
    (2, 2, 0, 0, 0),
    (0, 0, 4, 5, 3),
    (0, 1, 4, 5, 3),
]
every_case = pytest.mark.parametrize("sizes", EMPTY)
every_normalization = pytest.mark.parametrize("normalize", ["output", "keys", None])


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64).requires_grad_()


@every_case
@every_normalization
@pytest.mark.parametrize("backend", [None, "recurrent", "chunked", "plain"])
@pytest.mark.parametrize("decayed", [False, True])
def test_causal(sizes: tuple[int, ...], normalize: str | None, backend: str | None, decayed: bool) -> None:
    of_q, of_k, n, d, dv = sizes
    n = min(n, 1) if backend == "recurrent" else n
    q, k, v = leaf(of_q, 3, n, d), leaf(of_k, 3, n, d), leaf(of_k, 3, n, dv)
    S, z, w = leaf(of_k, 3, d, dv), leaf(of_k, 3, d), leaf(n)
    results = []
    for name in (backend if n or backend != "recurrent" else None, "reference"):
        options = {"normalize": normalize, "backend": name, "log_decay": -w if decayed else None}
        y, state = causal_linear_attention(q, k, v, LinearState(S, z), feature_map="elu_plus_one", **options)
        loss = y.square().sum() + state.S.square().sum() + state.z.square().sum()
        leaves = [q, k, v, S, z, w]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        results.append([y, state.S, state.z, *gradients])
    assert results[0][0].shape == (of_q, 3, n, dv)
    assert_close(*results)


@every_case
@every_normalization
@pytest.mark.parametrize("other", [0, 7])
def test_all_keys(sizes: tuple[int, ...], normalize: str | None, other: int) -> None:
    of_q, of_k, n, d, dv = sizes
    for queries, keys in ((n, other), (other, n)):
        leaves = leaf(of_q, 3, queries, d), leaf(of_k, 3, keys, d), leaf(of_k, 3, keys, dv)
        q, k, v = leaves
        results = []
        for y in (
            linear_attention(q, k, v, normalize=normalize, backend="reference"),
            linear_attention(q, k, v, normalize=normalize, backend="chunked"),
            read(q, summarize(k, v), normalize=normalize),
        ):
            assert y.shape == (of_q, 3, queries, dv)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        assert_close(results[1], results[0])
        assert_close(results[2], results[0])
