"""The example learns, and its loss does not depend on the number of processes."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from examples.tensor_parallel import train
from tests.processes import needs_processes, run_in_two


def both_ways(rank: int) -> None:
    losses = [
        train(init_device_mesh("cpu", shape, mesh_dim_names=("data", "heads")), steps=3) for shape in ((1, 2), (2, 1))
    ]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=0)
    assert losses[0][-1] < losses[0][0] - 0.1


@needs_processes
def test_heads_and_data_may_be_shared():
    run_in_two(both_ways)
