"""The base of stacks of branches. A subclass says how a branch's output joins the residual stream, once for whole
sequences and for the next tokens of a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from linattn.ops.state import checked_parts
from linattn.types import Context, ContextMask, TokenMask, Tokens

Step = Callable[[Any, Tokens], Tokens]
Hidden = Float[Tensor, "b n o"]
"""The output of a stack, as wide as its input unless projections change that."""


class Call(NamedTuple):
    """The arguments of every branch, beside x."""

    key_mask: TokenMask
    context: Context
    context_mask: ContextMask

    def __call__(self, branch: nn.Module, x: Tokens) -> Tokens:
        return branch(x, **self._asdict())


class Stack(nn.Module, ABC):
    """Branches that run in turn; tokens may come piece by piece."""

    branches: nn.ModuleList

    @property
    def depth(self) -> int:
        """The number of branches."""
        return len(self.branches)

    @abstractmethod
    def run(self, x: Tokens, step: Step) -> Hidden:
        """Return the stack's output; step(branch, x) returns that of a branch, and is called for each once, in turn."""

    def forward(
        self, x: Tokens, *, key_mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Hidden:
        return self.run(x, Call(key_mask, context, context_mask))

    def extend(
        self,
        x: Tokens,
        state: tuple[Any, ...] | None = None,
        *,
        key_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Hidden, tuple[Any, ...]]:
        """Process the next tokens; only the first call needs the context."""
        call, states = Call(key_mask, context, context_mask)._asdict(), []
        past = iter(checked_parts(state, self.depth))

        def step(branch: Any, x: Tokens) -> Tokens:
            y, after = branch.extend(x, next(past), **call)
            states.append(after)
            return y

        return self.run(x, step), tuple(states)
