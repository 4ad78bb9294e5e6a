"""How tensors are described to kernels; no kernel is needed to know whether it is right."""

import itertools

import pytest
import torch
from torch import Tensor

from linattn.ops.triton.layout import alignment, empty_like_tokens, readable, shared_groups, too_many_dimensions, unfold


def places(x: Tensor, lead: tuple[int, ...]) -> list[int]:
    """Where each row begins, in the order of the rows."""
    rows = itertools.product(*(range(size) for size in lead))
    sizes = x.shape[: len(lead)]
    return [sum(i * x.stride(d) for d, i in enumerate(row) if sizes[d] > 1) for row in rows]


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 1, 3), (2, 3, 4)])
def test_rows_begin_where_they_lie(lead: tuple[int, ...]) -> None:
    plain = torch.randn(*lead, 5, 8)
    behind = torch.randn(*lead[::-1], 5, 8).permute(*reversed(range(len(lead))), -2, -1)
    shared = torch.randn(*(1 for _ in lead[:1]), *lead[1:], 5, 8)
    tensors = [plain, behind, shared, None]
    rows = unfold(lead, tensors)
    assert rows.number == plain[..., 0, 0].numel()
    for x, (x0, x1, x2) in zip(tensors, rows.strides, strict=True):
        found = [
            row // (rows.size1 * rows.size2) * x0 + row // rows.size2 % rows.size1 * x1 + row % rows.size2 * x2
            for row in range(rows.number)
        ]
        assert found == (places(x, lead) if x is not None else [0] * rows.number)


def test_what_lies_together_is_one_dimension() -> None:
    assert unfold((2, 3, 4, 5), [torch.randn(2, 3, 4, 5, 7, 8)])[:3] == (120, 1, 120)
    grouped = [torch.randn(2, 3, 4, 7, 8), torch.randn(2, 3, 1, 7, 8)]
    assert unfold((2, 3, 4), grouped)[:3] == (24, 6, 4)


def test_units_hang_on_channels_and_not_on_the_length() -> None:
    for channels, expected in ((64, 16), (40, 8), (5, 1)):
        for n in (1, 7, 64, 100):
            x = torch.randn(2, n, 3, channels).transpose(1, 2)
            assert alignment([x], unfold((2, 3), [x])) in ((expected,) if n > 1 else (expected, 16))


def test_only_what_cannot_be_read_is_copied() -> None:
    x = torch.randn(2, 3, 7, 8)
    for view in (x, x.transpose(0, 1), x[..., 2:6], x.expand(4, 2, 3, 7, 8)):
        assert readable(view, view.shape[:-2]) is view
    assert readable(x.mT, (2, 3)).is_contiguous()
    far = torch.empty(8, 2**25, dtype=torch.bool)[:, :4]
    assert readable(far, ()).is_contiguous()
    assert too_many_dimensions((2, 2, 2, 2)) and not too_many_dimensions((2, 1, 2, 1, 2))
    assert readable(torch.randn(2, 2, 2, 1, 3, 4), (2, 2, 2, 2)).shape == (2, 2, 2, 2, 3, 4)


def test_outputs_lie_as_queries_do() -> None:
    q = torch.randn(2, 7, 3, 8).transpose(1, 2)
    assert empty_like_tokens(q, 8).stride() == q.stride()
    assert empty_like_tokens(q, 5).is_contiguous()


@pytest.mark.parametrize(
    ("lead", "sums", "turns"),
    [((2, 3), (2, 3), 1), ((2, 3, 4), (2, 3, 1), 2), ((2, 3, 4, 5), (2, 1, 4, 1), 4), ((1, 1), (1, 1), 0), ((), (), 0)],
)
def test_sharing_is_counted_in_turns(lead: tuple[int, ...], sums: tuple[int, ...], turns: int) -> None:
    assert shared_groups(lead, sums) == turns
