"""Feature maps: φ_q(q)·φ_k(k) stands in for softmax's exp(q·k). One file per map."""

from abc import ABC, abstractmethod
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.ops.features import Features
from linattn.ops.numerics import accumulator, is_readable


def unit(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Return x / ‖x‖ in x's dtype. A zero vector stays zero."""
    norm = _norm(x)
    is_zero = norm == 0
    if not is_readable(is_zero) or is_zero.any():
        # at 0 a norm has no second derivative
        norm = _norm(x.masked_fill(is_zero, 1)).masked_fill(is_zero, 1)
    return (x / norm).to(x.dtype)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulator(x.dtype))


class FeatureMap(nn.Module, ABC):
    """Maps queries and keys to features, whose inner products are the similarities. A map defines `query` and `key`."""

    normalize: str | None = "output"
    """The operator's normalisation with this map, unless the user gives another."""
    scales_products: bool = False
    """If True, φ(q)·φ(k) is a function of q·k/√d, or estimates one."""

    @abstractmethod
    def query(self, x: Float[Tensor, "*b n d"]) -> Features: ...

    @abstractmethod
    def key(self, x: Float[Tensor, "*b n d"]) -> Features: ...


_Map = TypeVar("_Map", bound=FeatureMap)


def checked_feature_map(feature_map: object, kind: type[_Map]) -> _Map:
    """Return `feature_map`. Raise ValueError if it is a name, or anything else that is not of the class `kind`."""
    if isinstance(feature_map, kind):
        return feature_map
    name = repr(feature_map)
    makes = f"the name {name}: linattn.FEATURE_MAPS[{name}](head_dim, num_heads, num_key_heads) makes one"
    raise ValueError(
        f"a {kind.__name__} is needed here, but this is "
        f"{makes if isinstance(feature_map, str) else f'a {type(feature_map).__name__}'}"
    )
