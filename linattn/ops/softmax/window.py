"""The windows of local attention: which positions a query sees."""

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor


class Window(NamedTuple):
    """The positions that a query sees: those closer than `size`, its own included, or if `bucketed`, its own bucket of
    `size` positions and both buckets next to it; in either case, if `causal`, none after its own."""

    size: int
    causal: bool = False
    bucketed: bool = False

    def first(self, i: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Return the first position that query i may see, which may be negative."""
        return (i // self.size - 1) * self.size if self.bucketed else i - self.size + 1

    def last(self, i: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Return the last position that query i may see, which may lie behind the end."""
        if self.causal:
            return i
        return (i // self.size + 2) * self.size - 1 if self.bucketed else i + self.size - 1

    def sees(self, i: Int[Tensor, "*#b"], j: Int[Tensor, "*#b"]) -> Bool[Tensor, "*b"]:
        return (j >= self.first(i)) & (j <= self.last(i))

    @property
    def reach(self) -> int:
        """The number of tokens before a block that its queries may see, and unless causal, also after it."""
        return self.size if self.bucketed else self.size - 1

    @property
    def past(self) -> int:
        """The number of tokens that a state keeps: all that a later query may see."""
        return 2 * self.size - 1 if self.bucketed else self.size - 1

    @property
    def block(self) -> int:
        """The number of queries per block: a multiple of a bucket, near the size that was the fastest on a CPU."""
        return -(-64 // self.size) * self.size if self.bucketed else 64 if self.size <= 128 else 128
