"""Generalised attention: any function of each number, of the inputs or of random projections of them.
Choromanski et al., https://arxiv.org/abs/2009.14794, section 2.2"""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.random_projection import RandomProjection


@final
class GeneralizedFeatureMap(FeatureMap):
    """φ(x) = kernel(Ω x/d^¼) + epsilon, or kernel(x) + epsilon without a projection.

    The epsilon makes every key a little similar to every query, which keeps kernels with zeros from ignoring all keys.
    A kernel that the operator has by name is faster as an `ElementwiseFeatureMap`. A lambda cannot be pickled."""

    def __init__(
        self, kernel: Callable[[Tensor], Tensor], *, epsilon: float = 0.0, projection: RandomProjection | None = None
    ):
        super().__init__()
        if epsilon < 0:
            raise ValueError(f"epsilon must not be negative, but is {epsilon}")
        self.kernel = kernel
        self.epsilon = epsilon
        self.projection = projection

    def redraw_(self, generator: torch.Generator | None = None) -> None:
        """Redraws the projection, if there is one."""
        if self.projection is not None:
            self.projection.redraw_(generator)

    def query(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]:
        projected = x if self.projection is None else self.projection(x)
        return (self.kernel(projected) + self.epsilon).to(x.dtype)

    def key(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]:
        return self.query(x)

    def extra_repr(self) -> str:
        return f"{getattr(self.kernel, '__name__', self.kernel)}, epsilon={self.epsilon}"
