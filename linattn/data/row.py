"""A long row of tokens, document after document, read from files: its memory does not depend on its length."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, final

import numpy as np


class Tokens(Protocol):
    """An array of tokens, or what reads them."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class Piece(NamedTuple):
    """The tokens of consecutive documents. `edges` are the places in their file where the documents begin, then the end
    of the last one; the first token of the piece is at `edges[0]`."""

    tokens: Tokens
    edges: np.ndarray


@final
class TokenRow:
    """Concatenates pieces without reading them. A slice reads its tokens; other indices are not supported."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = list(pieces)
        # the place in the row where each piece begins, and the end of the row
        self.borders = np.cumsum([0, *(len(piece.tokens) for piece in self.pieces)])

    def __len__(self) -> int:
        return int(self.borders[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        assert step == 1, "a row is read forwards"
        parts = [self.pieces[i].tokens[first:last] for i, first, last in self._overlaps(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint16), *parts])

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the places from `start` on and before `stop`, counted from `start`, where documents begin."""
        starts = [np.zeros(0, np.int64)]
        for i, first, last in self._overlaps(start, stop):
            edges = self.pieces[i].edges
            low, high = np.searchsorted(edges[:-1], np.array((first, last)) + edges[0])
            starts.append(edges[low:high].astype(np.int64) - edges[0] + self.borders[i] - start)
        return np.concatenate(starts)

    def _overlaps(self, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
        """Yield (i, first, last) for each piece i of which the tokens [first, last) are in [`start`, `stop`)."""
        i = int(np.searchsorted(self.borders, start, side="right")) - 1
        while i < len(self.pieces) and self.borders[i] < stop:
            begin = int(self.borders[i])
            yield i, max(start - begin, 0), min(stop - begin, len(self.pieces[i].tokens))
            i += 1
