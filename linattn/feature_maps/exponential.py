"""Exponential features, in range whatever their inputs: exp(x) = exp(x − m) exp(m), m the token's largest number."""

from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import ExponentialFeatureMap, value_dtype
from linattn.ops.backends.base import accumulator


def scaled_exp(x: Float[Tensor, "*b n f"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"]]:
    """exp(x) as (value, log_scale), with values up to 1."""
    exponent = x.to(accumulator(x.dtype))
    # any constant gives the same product, so no gradient need flow through this one
    largest = exponent.detach().amax(-1)
    return (exponent - largest.unsqueeze(-1)).exp_().to(value_dtype(x.dtype)), largest


@final
class ExpFeatureMap(ExponentialFeatureMap):
    """φ(x) = exp(x), channel by channel: φ(q)·φ(k) = Σ_c exp(q_c + k_c). It is not softmax's exp(q·k).

    Channels that lie more than 87 below the token's largest count as zero."""

    def scaled_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n"]]:
        return scaled_exp(x)

    def scaled_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n"]]:
        return scaled_exp(x)
