"""The state of linear attention: the sums over keys, from which any query can be answered."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class LinearState(NamedTuple):
    """The sums over the tokens seen so far. With a blindspot, those of the block that no query sees yet stand apart."""

    S: Float[Tensor, "*b f dv"]
    z: Float[Tensor, "*b f"]
    block_S: Float[Tensor, "*b f dv"] | None = None
    block_z: Float[Tensor, "*b f"] | None = None
    block_length: int = 0
