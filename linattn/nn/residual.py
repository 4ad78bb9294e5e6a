"""Stacks of branches, which add to one residual stream, or to two that can be recomputed from their outputs. Gomez et
al., RevNet, https://arxiv.org/abs/1707.04585; Kitaev et al., Reformer, https://arxiv.org/abs/2001.04451"""

from collections.abc import Iterable
from typing import Any, cast, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.nn.branch import Branch
from linattn.nn.reversal import Call, run_reversibly
from linattn.ops.names import unknown_name
from linattn.ops.state import checked_parts


@final
class ResidualSequence(nn.Module):
    """x ← x + branch(x) for each branch in turn."""

    def __init__(self, branches: Iterable[Branch]):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        for branch in self.branches:
            x = x + branch(x, key_mask=key_mask, context=context, context_mask=context_mask)
        return x

    def extend(
        self,
        x: Float[Tensor, "b n d"],
        state: tuple[Any, ...] | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], tuple[Any, ...]]:
        """Process the next tokens; only the first call needs the context."""
        call = Call(key_mask, context, context_mask)
        states: list[Any] = []
        for branch, past in zip(self.branches, checked_parts(state, len(self.branches)), strict=True):
            delta, after = _extend(branch, x, past, call)
            x = x + delta
            states.append(after)
        return x, tuple(states)


@final
class ReversibleSequence(nn.Module):
    """x₁ = x₂ = x; each pair (f, g) makes x₁ ← x₁ + f(x₂), then x₂ ← x₂ + g(x₁); the output is the mean of the two, or
    with `reduce="sum"` their sum.

    The backward pass computes each pair's inputs from its outputs: the memory for activations does not grow with the
    number of pairs, and one more forward is the price. The function differs from `ResidualSequence`. Gradients equal
    autograd's up to rounding and cannot be differentiated again; `extend` saves what autograd saves. Under
    torch.compile nothing is reversed: the compiler decides what to recompute."""

    def __init__(self, pairs: Iterable[tuple[Branch, Branch]], *, reduce: str = "mean"):
        super().__init__()
        if reduce not in ("mean", "sum"):
            raise unknown_name("reduce", reduce, ("mean", "sum"))
        self.branches = nn.ModuleList(branch for pair in pairs for branch in pair)
        self.reduce = reduce

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        call = Call(key_mask, context, context_mask)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._merge(*run_reversibly([*self.branches], x, call))
        first, second = x, x
        for branch in self.branches:
            first, second = second, first + branch(second, **call._asdict())
        return self._merge(first, second)

    def extend(
        self,
        x: Float[Tensor, "b n d"],
        state: tuple[Any, ...] | None = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], tuple[Any, ...]]:
        """Process the next tokens; only the first call needs the context."""
        call = Call(key_mask, context, context_mask)
        first, second, states = x, x, []
        for branch, past in zip(self.branches, checked_parts(state, len(self.branches)), strict=True):
            delta, after = _extend(branch, second, past, call)
            first, second = second, first + delta
            states.append(after)
        return self._merge(first, second), tuple(states)

    def _merge(self, first: Tensor, second: Tensor) -> Tensor:
        return (first + second) / 2 if self.reduce == "mean" else first + second

    def extra_repr(self) -> str:
        return f"reduce={self.reduce!r}"


def _extend(branch: nn.Module, x: Tensor, past: Any, call: Call) -> tuple[Tensor, Any]:
    return cast(Branch, branch).extend(x, past, **call._asdict())
