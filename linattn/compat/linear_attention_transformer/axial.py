"""Attention along the columns of a folded sequence: each token sees distant tokens at a stride, at a low cost.
Ho et al., Axial Attention in Multidimensional Transformers, https://arxiv.org/abs/1912.12180"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from linattn.attention.base import InnerAttention, checked_inner, checked_ungated
from linattn.ops.nested import map_state
from linattn.ops.numerics import check_exported_length
from linattn.ops.tokens.compaction import pack_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class AxialState(NamedTuple):
    """The state of the inner attention per column, (b, window, …), and the column of the next token."""

    inner: Any
    column: Int[Tensor, " b"]


@final
class AxialAttention(InnerAttention):
    """Writes the sequence into rows of `window` tokens; each token attends, by the attention `inner`, to those in
    its column: i − window, i − 2 · window, … and, if `inner` is not causal, i + window, ….

    The last row may be short. A masked token is a missing token: rows count present tokens only."""

    state_kind = AxialState
    same_tokens = True

    def __init__(self, inner: InnerAttention, window: int):
        super().__init__()
        if window < 1:
            raise ValueError(f"a window holds at least one token, but window is {window}")
        inner = checked_ungated(checked_inner(inner), "AxialAttention")
        self.inner, self.window, self.causal = inner, window, inner.causal

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        packed = pack_heads(q, k, v, _for_all_heads(key_mask))
        grid = _Grid.over(k, self.window, packed.total)
        # without a mask, the padding of the last row lies in the future
        mask = None if key_mask is None and (self.causal or k.shape[-2] % self.window == 0) else grid.mask
        return packed.unpack(grid.unfold(self.inner(*grid.fold(packed.q, packed.k, packed.v), key_mask=mask)))

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: AxialState | None, key_mask: KeyMask
    ) -> tuple[Outputs, AxialState]:
        inner = None if state is None else map_state(self._columns, state.inner)
        packed = pack_heads(q, k, v, _for_all_heads(key_mask))
        grid = _Grid.over(k, self.window, packed.total, state and state.column)
        y, inner = self.inner.extend(*grid.fold(packed.q, packed.k, packed.v), inner, key_mask=grid.mask)
        inner = map_state(lambda x: x.unflatten(0, (-1, self.window)), inner)
        arrived = k.shape[-2] if packed.total is None else packed.total.squeeze(1)
        return packed.unpack(grid.unfold(y)), AxialState(inner, (grid.column + arrived) % self.window)

    def _columns(self, x: Tensor) -> Tensor:
        """Make each column a sequence: (b, window, …) becomes (b · window, …)."""
        if x.ndim < 2 or x.shape[1] != self.window:
            raise ValueError(f"the state must be (b, {self.window}, ...), a row of columns, but is {tuple(x.shape)}")
        return x.flatten(0, 1)


class _Grid(NamedTuple):
    """Tokens in a grid of g cells, numbered along rows of `window`: the `cell` of each token, whether a cell holds a
    `present` one, and the `column` of the first token."""

    cell: Int[Tensor, "b n"]
    present: Bool[Tensor, "b g"]
    column: Int[Tensor, " b"]
    window: int

    @staticmethod
    def over(k: Tensor, window: int, total: Tensor | None = None, column: Tensor | None = None) -> "_Grid":
        """Return the grid of the tokens of k (b, h, n, d), of which the first `total` per sequence are present (None:
        all). The first token stands in the first row, in this `column` (None: 0)."""
        (b, _, n, _), token = k.shape, torch.arange(k.shape[-2], device=k.device)
        check_exported_length(n, "AxialAttention")
        # the number of rows serves every column, as a graph cannot depend on numbers in a tensor
        rows = -(-(n if column is None else window - 1 + n) // window)
        column = token.new_zeros(b) if column is None else column
        cell, arrived = token + column.unsqueeze(1), (token < (n if total is None else total)).expand(b, n)
        present = torch.zeros(b, rows * window, dtype=torch.bool, device=k.device).scatter(1, cell, arrived)
        return _Grid(cell, present, column, window)

    @property
    def mask(self) -> Bool[Tensor, "bw 1 rows"]:
        return self.present.unflatten(1, (-1, self.window)).transpose(1, 2).flatten(0, 1).unsqueeze(1)

    def fold(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rearrange tokens (b, h, n, d) to columns (b · window, h, rows, d), with zeros in cells without a token."""
        return self._fold(q), self._fold(k), self._fold(v)

    def _fold(self, x: Tensor) -> Tensor:
        grid = x.new_zeros(*x.shape[:2], self.present.shape[1], x.shape[3])
        grid = grid.scatter(-2, self.cell[:, None, :, None].expand_as(x), x)
        return grid.unflatten(2, (-1, self.window)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def unfold(self, y: Tensor) -> Tensor:
        grid = y.unflatten(0, (-1, self.window)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        return torch.take_along_dim(grid, self.cell[:, None, :, None], -2)


def _for_all_heads(key_mask: KeyMask) -> KeyMask:
    if key_mask is not None and key_mask.shape[1] != 1:
        raise ValueError(f"rows are the same for all heads: the mask must be (b, 1, n), but is {tuple(key_mask.shape)}")
    return key_mask
