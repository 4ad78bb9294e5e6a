import torch
from torch.testing import assert_close

from linattn.ops.linformer import pool_sequence, project_sequence


def test_a_package_slices_its_projection_and_so_do_we():
    """Which is the projection of the sequence filled up with zeros."""
    x, weight = torch.randn(2, 3, 20, 4), torch.randn(5, 32)
    padded = torch.cat([x, torch.zeros(2, 3, 12, 4)], -2)
    assert_close(project_sequence(x, weight), weight @ padded)


def test_means_of_what_is_there():
    x = torch.arange(8.0).view(1, 1, 8, 1)
    key_mask = torch.tensor([False, True, True, True, False, False, True, False])[None, None]
    pooled, present = pool_sequence(x, 3, key_mask=key_mask)
    assert_close(pooled.flatten(), torch.tensor([2.0, 6, 0]))
    assert present is not None and present.flatten().tolist() == [True, True, False]
    pooled, present = pool_sequence(x, 3)
    assert_close(pooled.flatten(), torch.tensor([1.0, 4, 6.5]))
    assert present is None


def test_half_precision_sums_do_not_saturate():
    x = torch.ones(1, 1, 100_000, 1, dtype=torch.float16)
    assert pool_sequence(x, 100_000)[0].item() == 1
    assert pool_sequence(x, 100_000, weight=torch.full((100_000, 1), 1e-5))[0].item() == 1
