"""The state of linear attention: the sums over the past, from which any query can be answered."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class LinearState(NamedTuple):
    """The sums over the tokens seen so far, `S` = Σ_j φ(k_j) v_jᵀ and `z` = Σ_j φ(k_j): float32, or float64 for float64
    inputs."""

    S: Float[Tensor, "*b f dv"]
    z: Float[Tensor, "*b f"]
