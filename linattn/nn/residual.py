"""Stacks of branches. The `run` of each class defines how the output of a branch joins the residual stream; it serves
whole sequences and the next tokens of a sequence."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.checks import check_instances, check_sizes, check_types, given
from linattn.names import unknown_name
from linattn.nn.attention import MultiheadAttention
from linattn.nn.branch import Branch, Call
from linattn.nn.checks import check_channels, check_floats
from linattn.nn.reversal import run_reversibly
from linattn.ops.nested import checked_parts
from linattn.types import Context, ContextMask, TokenMask, Tokens

Step = Callable[[Any, Tokens], Tokens]
Hidden = Float[Tensor, "b n o"]
"""The output of a stack, as wide as its input unless projections change that."""


class Extension:
    """A step for `run` that extends each of `depth` branches from its part of `state`. It takes the branch's part off
    the left of the deque `states`, which is `state` if that is a deque, and appends the new part to it."""

    def __init__(self, call: Call, state: tuple[Any, ...] | deque[Any] | None, depth: int):
        self.call, self.states = call, state if isinstance(state, deque) else deque(checked_parts(state, depth))

    def __call__(self, branch: Any, x: Tokens) -> Tokens:
        y, state = branch.extend(x, self.states.popleft(), **given(**self.call._asdict()))
        self.states.append(state)
        return y


class Stack(nn.Module, ABC):
    """Branches that run in turn. The state of a stack is a tuple with that of each branch."""

    branches: nn.ModuleList
    packs: bool = True  # a causal model moves present tokens in front of missing ones, so that branches need no mask

    @property
    def depth(self) -> int:
        """The number of branches."""
        return len(self.branches)

    @abstractmethod
    def run(self, x: Tokens, step: Step) -> Hidden:
        """Return the stack's output. Calls step(branch, x), which returns a branch's output, once for each, in turn."""

    def forward(
        self, x: Tokens, *, key_mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Hidden:
        return self.run(x, self._checked(Call(key_mask, context, context_mask)))

    def extend(
        self,
        x: Tokens,
        state: tuple[Any, ...] | deque[Any] | None = None,
        *,
        key_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Hidden, tuple[Any, ...]]:
        """Return the output for the next tokens, and the new state. Only the first call needs the context."""
        step = Extension(self._checked(Call(key_mask, context, context_mask)), state, self.depth)
        return self.run(x, step), tuple(step.states)

    def _checked(self, call: Call) -> Call:
        parts = () if call.context is None else self.modules()
        attends = any(isinstance(part, MultiheadAttention) and part.is_cross_attention for part in parts)
        return call.checked(attends, "there is no cross attention")


@final
class ResidualSequence(Stack):
    """x ← x + branch(x) for each of the `branches` in turn."""

    def __init__(self, branches: Iterable[Branch]):
        super().__init__()
        self.branches = nn.ModuleList(_checked(branches))

    def run(self, x: Tokens, step: Step) -> Tokens:
        for branch in self.branches:
            x = x + step(branch, x)
        return x


@final
class ReversibleSequence(Stack):
    """x₁ = x₂ = x; each of the `pairs` (f, g) makes x₁ ← x₁ + f(x₂), then x₂ ← x₂ + g(x₁); the output is the mean of
    the two, or with `reduce="sum"` their sum. Gomez et al., RevNet, https://arxiv.org/abs/1707.04585; Kitaev et al.,
    Reformer, https://arxiv.org/abs/2001.04451

    The backward pass computes each pair's inputs from its outputs: the memory for activations does not grow with the
    number of pairs, but a step takes one more forward pass. The function differs from `ResidualSequence`. Gradients
    equal autograd's up to rounding and cannot be differentiated again. `extend` is not reversed, so its activations are
    saved. Under torch.compile nothing is reversed: the compiler decides what to recompute."""

    def __init__(self, pairs: Iterable[tuple[Branch, Branch]], *, reduce: str = "mean"):
        super().__init__()
        if reduce not in ("mean", "sum"):
            raise unknown_name("reduce", reduce, ("mean", "sum"))
        pairs = [*pairs]
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                came = (
                    f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else type(pair).__name__
                )
                raise ValueError(f"pairs must be tuples of two branches, (f, g), but one is a {came}")
        self.branches = nn.ModuleList(_checked(branch for pair in pairs for branch in pair))
        self.reduce = reduce

    def run(self, x: Tokens, step: Step) -> Tokens:
        check_floats(x)
        # a step of `extend` cannot be repeated in the backward pass, as it moves the state on
        if isinstance(step, Call) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            first, second = run_reversibly([*self.branches], x, step)
        else:
            first, second = x, x
            for branch in self.branches:
                first, second = second, first + step(branch, second)
        return (first + second) / 2 if self.reduce == "mean" else first + second

    def extra_repr(self) -> str:
        return f"reduce={self.reduce!r}"


@final
class Projected(Stack):
    """y = out_proj(stack(in_proj(x))), a `stack` of another width than its surroundings', as with factorised
    embeddings: `in_dim` channels come in, the stack has `dim`, and `out_dim` go out; without `out_dim` the output keeps
    the stack's width. Lan et al., ALBERT, https://arxiv.org/abs/1909.11942"""

    @check_types
    def __init__(self, stack: Stack, in_dim: int, dim: int, *, out_dim: int | None = None):
        super().__init__()
        check_instances(Stack, stack=stack)
        check_sizes(in_dim=in_dim, dim=dim, **given(out_dim=out_dim))
        self.in_proj, self.stack = nn.Linear(in_dim, dim), stack
        self.out_proj = None if out_dim is None else nn.Linear(dim, out_dim)

    @property
    def depth(self) -> int:
        return self.stack.depth

    def run(self, x: Tokens, step: Step) -> Hidden:
        check_channels(x, self.in_proj)
        y = self.stack.run(self.in_proj(x), step)
        return y if self.out_proj is None else self.out_proj(y)


def _checked(branches: Iterable[Branch]) -> list[Branch]:
    branches = [*branches]
    check_instances(Branch, **{f"branches[{i}]": branch for i, branch in enumerate(branches)})
    return branches
