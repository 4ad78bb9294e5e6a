"""Exponential features, in range whatever their inputs: exp(x) = exp(x − m) exp(m), m the token's largest number."""

from abc import abstractmethod
from typing import final

import torch
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


class LogFeatureMap(ExponentialFeatureMap):
    """A map of positive features, which it defines by their logarithms, as (a, s) of exp(a + s)."""

    logarithmic = True

    @abstractmethod
    def log_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"] | None]: ...

    @abstractmethod
    def log_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"] | None]: ...

    def scaled_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"]]:
        return _scaled(*self.log_query(x), value_dtype(x.dtype))

    def scaled_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"]]:
        return _scaled(*self.log_key(x), value_dtype(x.dtype))


def _scaled(a: Tensor, s: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    value, log_scale = scaled_exp(a)
    return value.to(dtype), log_scale if s is None else log_scale + s


@final
class ExpFeatureMap(LogFeatureMap):
    """φ(x) = exp(x), channel by channel: φ(q)·φ(k) = Σ_c exp(q_c + k_c). It is not softmax's exp(q·k).

    Channels of a key from about 70 below the largest of the keys count as zero, of a query from 87 below its own."""

    def log_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], None]:
        return x, None

    def log_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], None]:
        return x, None
