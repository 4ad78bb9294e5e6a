"""What an inner attention is: a module from queries, keys and values, heads already split, to outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn


class InnerAttention(nn.Module, ABC):
    """Attention on split heads. Key heads may be fewer than query heads, each serving a group of consecutive ones,
    as in `scaled_dot_product_attention(enable_gqa=True)`."""

    causal: bool

    @abstractmethod
    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> Float[Tensor, "b h n dv"]: ...

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: Any = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], Any]:
        """The next tokens of sequences whose past is summed up in `state` (None: no past)."""
        raise NotImplementedError(f"{type(self).__name__} is not causal here, so it cannot be extended token by token")


def group_queries(q: Float[Tensor, "b h n d"], num_key_heads: int) -> Float[Tensor, "b hk g n d"]:
    """Consecutive query heads share a key head; keys then broadcast against the groups with `unsqueeze(2)`."""
    if q.shape[1] % num_key_heads:
        raise ValueError(
            f"the number of key heads must divide that of query heads, but there are {num_key_heads} and {q.shape[1]}"
        )
    return q.unflatten(1, (num_key_heads, -1))


def map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Applies the function to every tensor of a state: nested tuples of tensors, each with the batch in front."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, tuple):
        parts = [map_state(function, part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state
