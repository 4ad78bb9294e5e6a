"""What a feature map is: φ with φ_q(q)·φ_k(k) in the place of softmax's exp(q·k). Every other file here is one φ."""

from abc import ABC, abstractmethod
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """For features of a wide range: float16 has no room for them or their gradients, so float32 takes its place."""
    return torch.float32 if dtype == torch.float16 else dtype


class FeatureMap(nn.Module, ABC):
    """Maps queries and keys to features, whose inner products are the similarities."""

    elementwise: str | None = None
    """The operator's own name for this map, if it acts on each number alone: a backend then applies it in its loop."""

    normalize: str | None = "output"
    """How the operator normalises with this map, unless the user says otherwise."""

    logarithmic: bool = False
    """Whether there are `log_query` and `log_key`, of features that are all positive: the operator then takes the
    exponentials in its loop."""

    @abstractmethod
    def query(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]: ...

    @abstractmethod
    def key(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]: ...

    def scaled_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"] | None]:
        """The same features as value · exp(log_scale), so that the value stays in range. None: a scale of one.

        The value has `value_dtype(x.dtype)` or that of x, the scale at least float32; gradients flow through both."""
        return self.query(x), None

    def scaled_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"] | None]:
        return self.key(x), None

    def log_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"] | None]:
        """(a, s) with the features exp(a) · exp(s), neither in any range; s at least float32, or None for zero."""
        raise NotImplementedError(f"{type(self).__name__} does not give its features as logarithms")

    def log_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"] | None]:
        raise NotImplementedError(f"{type(self).__name__} does not give its features as logarithms")


_Map = TypeVar("_Map", bound=FeatureMap)


def checked_feature_map(feature_map: object, kind: type[_Map]) -> _Map:
    """Raise ValueError for a name, or anything else in the place of a feature map."""
    if isinstance(feature_map, kind):
        return feature_map
    name = repr(feature_map)
    makes = f"the name {name}: linattn.FEATURE_MAPS[{name}](head_dim, num_heads, num_key_heads) makes one"
    raise ValueError(
        f"a {kind.__name__} is needed here, but this is "
        f"{makes if isinstance(feature_map, str) else f'a {type(feature_map).__name__}'}"
    )


class ExponentialFeatureMap(FeatureMap):
    """A map whose features may be too large for their dtype; it defines them as value · exp(log_scale)."""

    @abstractmethod
    def scaled_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"]]: ...

    @abstractmethod
    def scaled_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], Float[Tensor, "*b n"]]: ...

    def query(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]:
        value, log_scale = self.scaled_query(x)
        return (value * log_scale.exp().unsqueeze(-1)).to(x.dtype)

    def key(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]:
        value, log_scale = self.scaled_key(x)
        return (value * log_scale.exp().unsqueeze(-1)).to(x.dtype)
