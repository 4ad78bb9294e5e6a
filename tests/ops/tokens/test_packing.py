"""Packed sequences are the sequences one by one."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from linattn.ops import causal_linear_attention, packed_log_decay


@pytest.mark.parametrize("normalize", ["output", "keys", None])
@pytest.mark.parametrize("lengths", [(70,), (0, 1, 64, 5, 0, 0, 130, 0), (1, 1, 1), (0,)])
def test_packed_sequences_do_not_see_each_other(lengths: tuple[int, ...], normalize: str | None) -> None:
    ends = torch.tensor([0, *itertools.accumulate(lengths)])
    n = sum(lengths)
    q, k, v = (torch.rand(2, n, 5, dtype=torch.float64).requires_grad_() for _ in range(3))
    y, _ = causal_linear_attention(q, k, v, log_decay=packed_log_decay(ends, n).double(), normalize=normalize)
    parts = [[x[:, start:stop] for x in (q, k, v)] for start, stop in itertools.pairwise(ends.tolist())]
    alone = torch.cat([causal_linear_attention(*part, normalize=normalize)[0] for part in parts], -2)
    assert_close(y, alone)
    upstream = torch.randn_like(y)
    assert_close(torch.autograd.grad(y, (q, k, v), upstream), torch.autograd.grad(alone, (q, k, v), upstream))


def test_sequences_may_decay_too() -> None:
    ends, own = torch.tensor([0, 3, 10], dtype=torch.int32), -torch.rand(2, 10)
    total = packed_log_decay(ends, 10) + own
    assert torch.isneginf(total[:, [0, 3]]).all() and torch.isfinite(total).sum() == 16
    assert_close(total[:, 4:], own[:, 4:])
