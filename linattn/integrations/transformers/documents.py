"""The masks of tokens: which are present, whether attention is causal, and rows that hold several documents."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

CAUSAL = torch.int8
"""The dtype of causal masks (b 1 1 m), which are 1 where a key is present, and may have no columns if all keys are.
Masks that show the same keys to all queries are bool."""
DOCUMENTS = torch.int32
"""The dtype of causal masks (b 1 1 n) that number the document of each token."""
MARK = "linattn_documents"
"""A keyword argument that only calls inside a model after `speed_up` have: the number of each token's document, or None
for one document per row."""


def present_keys(mask: Shaped[Tensor, "b 1 1 m"] | None) -> Bool[Tensor, "b m"] | None:
    """Return which keys are present, None if all are. In a mask of document numbers, all are."""
    return None if mask is None or mask.dtype == DOCUMENTS or not mask.shape[-1] else mask[:, 0, 0].bool()


def document_numbers(mask: Shaped[Tensor, "b 1 1 n"] | None) -> Int[Tensor, "b n"] | None:
    """Return the number of each token's document, None if each row is one document."""
    return None if mask is None or mask.dtype != DOCUMENTS else mask[:, 0, 0]


class DocumentRows(NamedTuple):
    """The documents of packed rows, each in a padded row of its own. Neighbouring tokens with the same number belong to
    one document."""

    row: Int[Tensor, " tokens"]
    column: Int[Tensor, " tokens"]
    present: Bool[Tensor, "rows columns"]
    shape: tuple[int, int]

    def split(self, x: Shaped[Tensor, "b n *rest"]) -> Shaped[Tensor, "rows columns *rest"]:
        """Move each document into its own row, and pad the rows with zeros."""
        x = x.flatten(0, 1)
        return x.new_zeros(*self.present.shape, *x.shape[1:]).index_put((self.row, self.column), x)

    def join(self, y: Shaped[Tensor, "rows columns *rest"]) -> Shaped[Tensor, "b n *rest"]:
        """Move the tokens back into the packed rows, without the padding."""
        return y[self.row, self.column].unflatten(0, self.shape)


def document_rows(documents: Int[Tensor, "b n"]) -> DocumentRows:
    column = positions_in(documents).flatten()
    row = (column == 0).cumsum(0) - 1
    size = (int(row[-1]) + 1, int(column.max()) + 1)
    present = torch.zeros(size, dtype=torch.bool, device=row.device).index_put((row, column), row >= 0)
    b, n = documents.shape
    return DocumentRows(row, column, present, (b, n))


def positions_in(documents: Int[Tensor, "#b n"]) -> Int[Tensor, "#b n"]:
    """Return the distance of each token from the first of its document."""
    place = torch.arange(documents.shape[1], device=documents.device)
    starts = F.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
    return place - torch.where(starts, place, 0).cummax(-1).values
