"""Types of arguments by name and shape, so that a signature fits on a line. The legend is the same everywhere: b batch,
h heads, hk key heads, n queries or tokens, m keys or tokens of a context, d channels, dv of values, c of a context.

Types of masks and of contexts include None: a mask of None means that every token is present."""

from collections.abc import Callable

from jaxtyping import Bool, Float, Int
from torch import Tensor

# split heads; with fewer key heads than heads, each serves a group of consecutive query heads
Queries = Float[Tensor, "b h n d"]
Keys = Float[Tensor, "b hk m d"]
Values = Float[Tensor, "b hk m dv"]
Outputs = Float[Tensor, "b h n dv"]
KeyMask = Bool[Tensor, "#b #hk m"] | None

Reduction = Callable[[Tensor, str], Tensor]
"""The "max" or the "mean" of numbers over the ranks that have the channels of a vector."""

# the tokens of a model
Tokens = Float[Tensor, "b n d"]
TokenMask = Bool[Tensor, "b n"] | None
TokenIds = Int[Tensor, "b n"]
Context = Float[Tensor, "b m c"] | None
ContextMask = Bool[Tensor, "b m"] | None
