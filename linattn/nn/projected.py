"""A stack between two projections, so that its width may differ from its surroundings', as with factorised embeddings.
Lan et al., ALBERT, https://arxiv.org/abs/1909.11942, section 3.1"""

from typing import final

from torch import nn

from linattn.nn.stack import Hidden, Stack, Step
from linattn.types import Tokens


@final
class Projected(Stack):
    """y = out_proj(stack(in_proj(x))); without `out_dim` the output keeps the stack's width."""

    def __init__(self, stack: Stack, in_dim: int, dim: int, *, out_dim: int | None = None):
        super().__init__()
        self.in_proj, self.stack = nn.Linear(in_dim, dim), stack
        self.out_proj = None if out_dim is None else nn.Linear(dim, out_dim)

    @property
    def depth(self) -> int:
        return self.stack.depth

    def run(self, x: Tokens, step: Step) -> Hidden:
        y = self.stack.run(self.in_proj(x), step)
        return y if self.out_proj is None else self.out_proj(y)
