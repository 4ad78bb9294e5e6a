"""Decay rates per head, the γ of retention. Sun et al., https://arxiv.org/abs/2307.08621, eq. 8"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.checks import check_sizes, check_types
from linattn.initialization import assign, places


@final
class Decay(nn.Module):
    """log γ for each of `num_key_heads`: fixed at log(1 − 2^(−5−i)) for head i, or, if `learned`, −softplus(w) with a
    parameter w, which equals the fixed value at first."""

    log_decay: Tensor

    @check_types
    def __init__(self, num_key_heads: int, *, learned: bool = False):
        super().__init__()
        check_sizes(num_key_heads=num_key_heads)
        self.num_key_heads, self.learned = num_key_heads, learned
        if learned:
            self.w = nn.Parameter(torch.empty(num_key_heads))
        else:
            self.register_buffer("log_decay", torch.empty(num_key_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        target = self.w if self.learned else self.log_decay
        lost = torch.exp2(-5.0 - places(target))
        fixed = torch.log1p(-lost)
        # softplus(log(lost / (1 − lost))) = −log(1 − lost)
        assign(target, lost.log() - fixed if self.learned else fixed)

    def forward(self) -> Float[Tensor, "hk 1"]:
        return (-nn.functional.softplus(self.w) if self.learned else self.log_decay).unsqueeze(-1)

    def extra_repr(self) -> str:
        return f"{self.num_key_heads}, learned={self.learned}"
