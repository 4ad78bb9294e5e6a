"""Mark the brightest of five digits. How bright the canvas is as a whole is drawn too, so that a digit alone does not
tell: it has to be compared with the others, wherever they are."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from examples.segmentation.glyphs import SIZE
from examples.segmentation.task import Batch, Task

CELLS, CELL, DIGITS = 3, 16, 5
GAINS = (0.4, 0.55, 0.7, 0.85, 1.0)
# of the whole canvas, its least gain, and how bright a pixel of a digit is that counts as the digit's
DIMMEST, INK = 0.3, 0.2


@final
class BrightestDigit(Task):
    name, steps, batch_size = "brightest digit", 800, 32

    def __init__(self, glyphs: Float[Tensor, "digits 14 14"], *, test_canvases: int = 300):
        """A tenth of the glyphs are for the test."""
        held_out = max(DIGITS, len(glyphs) // 10)
        self.glyphs = glyphs[held_out:]
        self.test = canvases(glyphs[:held_out], test_canvases, torch.Generator().manual_seed(0))

    def draw(self, generator: torch.Generator) -> Batch:
        return canvases(self.glyphs, self.batch_size, generator)


def canvases(glyphs: Float[Tensor, "digits 14 14"], count: int, generator: torch.Generator) -> Batch:
    """48 × 48 pixels, a grid of 3 × 3 cells, in five of which a digit stands."""
    side, slack = CELLS * CELL, CELL - SIZE
    images, masks = torch.zeros(count, 1, side, side), torch.zeros(count, side, side, dtype=torch.bool)
    which = torch.randint(len(glyphs), (count, DIGITS), generator=generator)
    shift = torch.randint(slack + 1, (count, DIGITS, 2), generator=generator).tolist()
    dim = DIMMEST + (1 - DIMMEST) * torch.rand(count, generator=generator)
    for row in range(count):
        cells = torch.randperm(CELLS * CELLS, generator=generator)[:DIGITS].tolist()
        for digit, (cell, (down, right)) in enumerate(zip(cells, shift[row], strict=True)):
            top, left = cell // CELLS * CELL + down, cell % CELLS * CELL + right
            place = (slice(top, top + SIZE), slice(left, left + SIZE))
            glyph = glyphs[which[row, digit]]
            images[row, 0][place] = GAINS[digit] * dim[row] * glyph
            if digit == DIGITS - 1:
                masks[row][place] = glyph > INK
    return Batch(images, masks)
