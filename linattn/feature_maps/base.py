"""Features and the maps that make them: φ_q(q)·φ_k(k) stands in for softmax's exp(q·k). One file per map."""

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.numerics import accumulator


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for float16, whose range is too small for many features and their gradients."""
    return torch.float32 if dtype == torch.float16 else dtype


def unit(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Return x / ‖x‖ in x's dtype. A zero vector stays zero."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulator(x.dtype))
    return (x / norm.masked_fill(norm == 0, 1)).to(x.dtype)


class Features(NamedTuple):
    """The features function(x) · exp(log_scale) of each token; the scale takes up a large range.

    `x` holds f numbers per token. `function` is a name in `ELEMENTWISE`, and the operator applies it in its loop.
    `log_scale` is at least float32; None means zero. Gradients flow through `x` and `log_scale`."""

    x: Float[Tensor, "*b n f"]
    log_scale: Float[Tensor, "*b n"] | None = None
    function: str = "identity"

    def value(self) -> Float[Tensor, "*b n f"]:
        """Return the features themselves, which overflow and vanish where the formula does. float16 becomes float32."""
        x, log_scale, _ = self.evaluated()
        return x if log_scale is None else (x * log_scale.exp().unsqueeze(-1)).to(x.dtype)

    def evaluated(self) -> "Features":
        """Apply the function. Exponentials are at most 1 then, and the scale holds the rest."""
        x, log_scale, function = self.with_negative_exponents()
        return Features(ELEMENTWISE[function].function(x.to(value_dtype(x.dtype))), log_scale)

    def scalable(self) -> "Features":
        """Apply the function unless a scale can move into its argument, as it can for the identity and for exp."""
        return self if self.log_scale is None or self.function in ("identity", "exp") else self.evaluated()

    def with_negative_exponents(self) -> "Features":
        """Move the largest exponent of each token into the scale, if the function is exp."""
        if self.function != "exp":
            return self
        largest = self._largest()
        log_scale = largest if self.log_scale is None else largest + self.log_scale
        return Features(self.x - largest.unsqueeze(-1), log_scale, "exp")

    def log_size(self) -> Float[Tensor, "*b n"] | None:
        """Return the logarithm of each token's size, without gradient: of the largest feature if the function is exp,
        else of the scale. None means that no feature needs a scale."""
        if self.function != "exp":
            return None if self.log_scale is None else self.log_scale.detach()
        return self._largest() if self.log_scale is None else self._largest() + self.log_scale.detach()

    def relative_to(self, log_size: Float[Tensor, "*#b #n"] | None) -> Float[Tensor, "*b n f"]:
        """Return what `function` makes into the features divided by exp(log_size). They must be `scalable`."""
        if log_size is None:
            return self.x
        if self.function == "exp":
            shift = log_size if self.log_scale is None else log_size - self.log_scale
            return self.x - shift.unsqueeze(-1)
        # the product has the dtype of the scale, at least float32, as the scale may be small
        return self.x if self.log_scale is None else self.x * (self.log_scale - log_size).exp().unsqueeze(-1)

    def _largest(self) -> Float[Tensor, "*b n"]:
        # any shift of the exponents gives the same product with the scale, so no gradient need flow through this one
        return self.x.detach().amax(-1).to(accumulator(self.x.dtype))


class FeatureMap(nn.Module, ABC):
    """Maps queries and keys to features, whose inner products are the similarities. A map defines `query` and `key`."""

    normalize: str | None = "output"
    """The operator's normalisation with this map, unless the user gives another."""

    @abstractmethod
    def query(self, x: Float[Tensor, "*b n d"]) -> Features: ...

    @abstractmethod
    def key(self, x: Float[Tensor, "*b n d"]) -> Features: ...


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
