"""Token shift: some of each token's channels come from its neighbours, which costs nothing and helps most at short
range. Peng et al., RWKV, https://arxiv.org/abs/2305.13048, section 3.1, after the token shift of BlinkDL's code."""

from typing import final

import torch
from torch import nn

from linattn.checks import check_types
from linattn.nn.checks import check_tokens
from linattn.nn.convolution import Past, run_on_present
from linattn.types import TokenMask, Tokens


@final
class TokenShift(nn.Module):
    """y_i = [x_{i−o₁} of the first channels, x_{i−o₂} of the next, …]. The `offsets` (1, 0) take the first half of the
    channels from the previous token; (1, 0, −1) take a third each from the previous token, itself and the next one.
    With an offset below zero, `extend` raises NotImplementedError.

    Channels left over by the division are not shifted. Missing tokens are skipped: the neighbour is the next present
    token, or zeros if there is none."""

    @check_types
    def __init__(self, offsets: tuple[int, ...]):
        super().__init__()
        if not offsets:
            raise ValueError("a token shift needs at least one offset, as (1, 0), but there is none")
        self.offsets = tuple(offsets)
        self.past, self.future = max(0, *self.offsets), max(0, *(-offset for offset in self.offsets))

    def forward(self, x: Tokens, *, key_mask: TokenMask = None) -> Tokens:
        return self._run(x, None, key_mask)[0]

    def extend(self, x: Tokens, state: Past | None = None, *, key_mask: TokenMask = None) -> tuple[Tokens, Past]:
        """Process the next tokens. The state holds as many last present inputs per row as the largest offset."""
        if self.future:
            raise NotImplementedError(f"offsets {self.offsets} look ahead, so tokens cannot be added one by one")
        return self._run(x, state, key_mask)

    def _run(self, x: Tokens, state: Past | None, key_mask: TokenMask) -> tuple[Tokens, Past]:
        check_tokens(x, None, key_mask)
        return run_on_present(self._shift, x, state, self.past, key_mask)

    def _shift(self, past: Past | None, x: Tokens) -> Tokens:
        past = x.new_zeros(x.shape[0], self.past, x.shape[2]) if past is None else past
        n, width = x.shape[1], x.shape[2] // len(self.offsets)
        inputs = torch.cat([past, x, x.new_zeros(x.shape[0], self.future, x.shape[2])], 1)
        places = [*self.offsets, 0]
        segments = inputs.split([width] * len(self.offsets) + [x.shape[2] - width * len(self.offsets)], -1)
        starts = (self.past - offset for offset in places)
        return torch.cat([part[:, start : start + n] for part, start in zip(segments, starts, strict=True)], -1)

    def extra_repr(self) -> str:
        return f"{self.offsets}"
