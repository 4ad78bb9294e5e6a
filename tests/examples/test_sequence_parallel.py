"""The example of sequence parallel learns, and every process sees the same loss."""

from examples.sequence_parallel import train
from tests.processes import needs_processes, run_in_two


def work(rank: int) -> None:
    losses = train(tokens=1024, steps=3, attention="elu", dim=16)
    assert losses[-1] < losses[0] < 6


@needs_processes
def test_the_loss_falls():
    run_in_two(work)
