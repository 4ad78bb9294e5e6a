"""The residual stream of fast-transformers, which is normalised after each addition."""

from collections.abc import Iterable
from typing import final

from torch import nn

from linattn.nn import Branch
from linattn.nn.residual import Stack, Step
from linattn.types import Tokens


@final
class PostNormSequence(Stack):
    """x ← norm(x + branch(x)) for each branch in turn, each with a norm of its own, as in the first transformers.
    Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762, section 3.1"""

    def __init__(self, branches: Iterable[Branch], norms: Iterable[nn.Module]):
        super().__init__()
        self.branches, self.norms = nn.ModuleList(branches), nn.ModuleList(norms)
        if len(self.branches) != len(self.norms):
            raise ValueError(f"each branch needs its norm, but there are {len(self.branches)} and {len(self.norms)}")

    def run(self, x: Tokens, step: Step) -> Tokens:
        for branch, norm in zip(self.branches, self.norms, strict=True):
            x = norm(x + step(branch, x))
        return x
