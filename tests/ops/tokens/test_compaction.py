import pytest
import torch
from torch import Tensor

from linattn.ops.tokens.compaction import compact, last_tokens, pack, packed_mask, unpack
from tests.laws import masks

every_mask = pytest.mark.parametrize("kind", ["left", "right", "holes", "all"])


def mask(kind: str, n: int = 20) -> Tensor:
    return masks(n)[kind][:, 0]


@every_mask
def test_what_order_rank_and_total_are(kind):
    key_mask = mask(kind)
    where = compact(key_mask)
    for row in range(2):
        present = key_mask[row].nonzero()[:, 0]
        assert where.total[row] == len(present)
        assert torch.equal(where.order[row, : len(present)], present)
        assert torch.equal(where.order[row].sort().values, torch.arange(20))
        assert torch.equal(where.rank[row, present], torch.arange(len(present)))
        assert torch.equal(packed_mask(where)[row], torch.arange(20) < len(present))


@every_mask
@pytest.mark.parametrize("heads", [(), (3,)])
def test_tokens_go_left_and_come_back(kind, heads):
    key_mask = mask(kind).view(2, *(1 for _ in heads), 20)
    where = compact(key_mask)
    kept = key_mask.unsqueeze(-1).expand(2, *heads, 20, 4)
    x = torch.randn(2, *heads, 20, 4)
    packed = pack(torch.where(kept, x, torch.nan), where)
    for row in range(2):
        total = int(where.total[row])
        assert torch.equal(packed[row, ..., :total, :], x[row][..., key_mask[row].flatten(), :])
        assert not packed[row, ..., total:, :].any()
    assert torch.equal(unpack(packed, where, key_mask), torch.where(kept, x, 0))


def test_no_tokens():
    where = compact(torch.ones(2, 0, dtype=torch.bool))
    x = torch.randn(2, 0, 3)
    assert unpack(pack(x, where), where, torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0, 3)
    assert last_tokens(torch.ones(2, 4, 3), x, where.total).shape == (2, 4, 3)


@every_mask
@pytest.mark.parametrize("size", [0, 1, 5, 30])
def test_last_tokens_of_each_row(kind, size):
    past, new, key_mask = torch.randn(2, size, 3), torch.randn(2, 20, 3), mask(kind)
    where = compact(key_mask)
    last = last_tokens(past, pack(new, where), where.total)
    for row in range(2):
        both = torch.cat([past[row], new[row, key_mask[row]]])
        assert torch.equal(last[row], both[len(both) - size :])
    everything = last_tokens(past, new)
    assert torch.equal(everything, torch.cat([past, new], 1)[:, 20:])
    assert everything.untyped_storage().nbytes() == everything.nbytes
