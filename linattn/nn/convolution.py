"""Short causal convolutions: each token sees itself and the few before it. They are the cheapest way to look at exact
neighbours, which linear attention is worst at."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from linattn.checks import check_sizes, check_types
from linattn.initialization import places
from linattn.nn.checks import check_floats, check_input, check_mask, check_tokens
from linattn.nn.starts import ages
from linattn.ops.convolution import short_convolution
from linattn.ops.nested import check_part, checked_parts, for_batch
from linattn.ops.tokens.compaction import compact, last_tokens, pack, unpack
from linattn.types import TokenMask, Tokens

Past = Float[Tensor, "b w d"]
"""The last w present inputs per row, preceded by zeros."""


@final
class ShortConvolution(nn.Module):
    """y_i = x_i + b + Σ_{j < width} w_j ⊙ x_{i-j} over `dim` channels: depthwise and causal, over the token itself and
    `width` - 1 before it. `residual=False` leaves the first x_i out.

    A missing token is skipped: the neighbours of a token are the present ones before it."""

    @check_types
    def __init__(self, dim: int, width: int, *, residual: bool = True):
        super().__init__()
        check_sizes(dim=dim, width=width)
        self.residual = residual
        # weight[0] belongs to the oldest token, weight[-1] to the token itself
        self.weight = nn.Parameter(torch.empty(width, dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights uniformly in ±1, so that neighbours weigh as much as the token itself: twice torch's range for
        a width of 4. Characters are learnt faster so; small weights lose most of what the convolution gains."""
        nn.init.uniform_(self.weight, -1, 1)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tokens, *, key_mask: TokenMask = None, starts: TokenMask = None) -> Tokens:
        return self.extend(x, key_mask=key_mask, starts=starts)[0]

    def extend(
        self, x: Tokens, state: Past | None = None, *, key_mask: TokenMask = None, starts: TokenMask = None
    ) -> tuple[Tokens, Past]:
        """Process the next tokens. The state is the last width - 1 present inputs. `starts` is True for the first token
        of each sequence; no token sees beyond it."""
        check_floats(x, self.weight)
        check_tokens(x, self.weight.shape[1], key_mask)
        width = self.weight.shape[0] - 1
        check_mask(x, starts, starts=True)
        if starts is None:
            return run_on_present(self._filter, x, state, width, key_mask)
        age, after = ages(starts, key_mask)
        age = age.unsqueeze(-1)
        age = age if key_mask is None else pack(age, compact(key_mask))
        y, past = run_on_present(partial(self._filter_sequences, age=age), x, state, width, key_mask)
        distance = torch.arange(width, 0, -1, device=x.device)
        return y, torch.where((distance <= after.unsqueeze(-1)).unsqueeze(-1), past, 0)

    def _filter(self, past: Past | None, x: Tokens) -> Tokens:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weights, bias = self._weights().unsqueeze(0).to(dtype), self.bias.unsqueeze(0).to(dtype)
        return short_convolution(x.to(dtype), weights, bias, None if past is None else past.to(dtype))

    def _filter_sequences(self, past: Past | None, x: Tokens, age: Tensor) -> Tokens:
        """Filter rows of several sequences; `age` is the number of tokens before each one in its sequence."""
        weights, n = self._weights(), x.shape[1]
        past = x.new_zeros(x.shape[0], len(weights) - 1, x.shape[2]) if past is None else past
        inputs, y = torch.cat([past, x], 1), self.bias
        for distance, weight in enumerate(weights.flip(0)):
            start = len(weights) - 1 - distance
            y = y + weight * torch.where(age >= distance, inputs[:, start : start + n], 0)
        return y

    def _weights(self) -> Tensor:
        """Return the weights with the residual, which is a weight of 1 for the token itself."""
        return torch.cat([self.weight[:-1], self.weight[-1:] + 1]) if self.residual else self.weight


@final
class ProjectionConvolutions(nn.Module):
    """silu(conv(x)) for each of several projections, those of q, k and v, with a `ShortConvolution` of its own."""

    def __init__(self, dims: Sequence[int], width: int):
        super().__init__()
        self.parts = nn.ModuleList(ShortConvolution(dim, width) for dim in dims)

    @torch.no_grad()
    def begin_induction(self) -> None:
        """Change what was drawn for q, k and v: k becomes what q is, one token later, and v sees the token itself."""
        q, k, v = (cast(ShortConvolution, part).weight for part in self.parts)
        place, last = places(q), len(q) - 1
        # one token later, q would look back too far
        q.mul_(place > 0)
        # the residuals are one token apart, too
        k.copy_(q.roll(-1, 0) + 1.0 * (place == last - 1) - 1.0 * (place == last))
        v.zero_()

    def extend(
        self,
        projections: tuple[Tensor, ...],
        state: tuple[Tensor, ...] | None = None,
        *,
        key_mask: TokenMask = None,
        starts: TokenMask = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Process the next tokens of each projection. The state is a tuple with that of each convolution."""
        pasts = checked_parts(state, len(self.parts))
        pieces = zip(self.parts, projections, pasts, strict=True)
        results = [
            cast(ShortConvolution, part).extend(x, past, key_mask=key_mask, starts=starts) for part, x, past in pieces
        ]
        return tuple(F.silu(y) for y, _ in results), tuple(after for _, after in results)


@final
class GatedConvolution(nn.Module):
    """y = (1 + W x + b) ⊙ conv(x): a layer that mixes neighbours, where attention would be too much. x and y have `dim`
    channels, conv is a `ShortConvolution` of `width` without residual, and `dropout` acts on y.

    This is Zoology's BaseConv with a gate that starts open: a product with random numbers would hide the neighbours at
    first, and recall would be learnt some 200 steps later. Arora et al., https://arxiv.org/abs/2312.04927"""

    @check_types
    def __init__(self, dim: int, width: int, *, dropout: float = 0.0):
        super().__init__()
        self.convolution = ShortConvolution(dim, width, residual=False)
        self.g_proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tokens, *, key_mask: TokenMask = None) -> Tokens:
        return self.extend(x, key_mask=key_mask)[0]

    def extend(self, x: Tokens, state: Past | None = None, *, key_mask: TokenMask = None) -> tuple[Tokens, Past]:
        check_input(x, self.g_proj)
        y, state = self.convolution.extend(x, state, key_mask=key_mask)
        return self.dropout((1 + self.g_proj(x)) * y), state


def run_on_present(
    function: Callable[[Past | None, Tokens], Tokens], x: Tokens, past: Past | None, width: int, key_mask: TokenMask
) -> tuple[Tokens, Past]:
    """Apply function(past, x) to the present tokens of x, in order. Return the outputs, with zeros at missing tokens,
    and the last `width` present inputs, which are the next call's `past`. A past of None stands for zeros."""
    if past is not None:
        check_part("last inputs", past, x.dtype, width, x.shape[2])
        past = for_batch(past, x.shape[0])
    where = None if key_mask is None else compact(key_mask)
    packed = x if where is None else pack(x, where)
    y = function(past, packed)
    y = y if where is None or key_mask is None else unpack(y, where, key_mask)
    start = x.new_zeros(x.shape[0], width, x.shape[2]) if past is None else past
    return y, last_tokens(start, packed, None if where is None else where.total)
