"""A stack between two projections, so that its width may differ from its surroundings', as with factorised embeddings.
Lan et al., ALBERT, https://arxiv.org/abs/1909.11942, section 3.1"""

from typing import Any, cast, final

from jaxtyping import Bool, Float
from torch import Tensor, nn


@final
class Projected(nn.Module):
    """y = out_proj(stack(in_proj(x))); without `out_dim` the output keeps the stack's width."""

    def __init__(self, stack: nn.Module, in_dim: int, dim: int, *, out_dim: int | None = None):
        super().__init__()
        self.in_proj, self.stack = nn.Linear(in_dim, dim), stack
        self.out_proj = None if out_dim is None else nn.Linear(dim, out_dim)

    def forward(
        self,
        x: Float[Tensor, "b n e"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n o"]:
        return self._out(self.stack(self.in_proj(x), key_mask=key_mask, context=context, context_mask=context_mask))

    def extend(
        self,
        x: Float[Tensor, "b n e"],
        state: Any = None,
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m c"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n o"], Any]:
        call = {"key_mask": key_mask, "context": context, "context_mask": context_mask}
        y, state = cast(Any, self.stack).extend(self.in_proj(x), state, **call)
        return self._out(y), state

    def _out(self, y: Tensor) -> Tensor:
        return y if self.out_proj is None else self.out_proj(y)
