"""From a cell's names to its work."""

from linattn.cli.bench import cells, models, operators
from linattn.cli.bench.cells import Cell, Setup, Work

PREPARE = {
    cells.FORWARD: operators.forward,
    cells.TRAINING: operators.training,
    cells.DECODING: operators.decoding,
    cells.MODEL_TRAINING: models.training,
    cells.MODEL_PREFILL: models.prefill,
    cells.MODEL_DECODING: models.decoding,
}


def prepare(setup: Setup, cell: Cell) -> Work:
    return PREPARE[cell.work](setup, cell)
