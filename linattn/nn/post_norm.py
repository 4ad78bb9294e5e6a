"""The residual stream of the first transformers, normalised after each addition.
Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762, section 3.1"""

from collections.abc import Iterable
from typing import Any, final

from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.nn.branch import Branch
from linattn.ops.state import checked_parts


@final
class PostNormSequence(nn.Module):
    """x ← norm(x + branch(x)) for each branch in turn, each with a norm of its own."""

    def __init__(self, branches: Iterable[Branch], norms: Iterable[nn.Module]):
        super().__init__()
        self.branches, self.norms = nn.ModuleList(branches), nn.ModuleList(norms)
        if len(self.branches) != len(self.norms):
            raise ValueError(f"each branch needs its norm, but there are {len(self.branches)} and {len(self.norms)}")

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        for branch, norm in zip(self.branches, self.norms, strict=True):
            x = norm(x + branch(x, key_mask=key_mask, context=context, context_mask=context_mask))
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
        past = checked_parts(state, len(self.branches))
        call = {"key_mask": key_mask, "context": context, "context_mask": context_mask}
        states: list[Any] = []
        for branch, norm, before in zip(self.branches, self.norms, past, strict=True):
            assert isinstance(branch, Branch)
            delta, after = branch.extend(x, before, **call)
            x = norm(x + delta)
            states.append(after)
        return x, tuple(states)
