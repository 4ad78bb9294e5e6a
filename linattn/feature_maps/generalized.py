"""Generalised attention: any function of each number, of the inputs or of random projections of them.
Choromanski et al., https://arxiv.org/abs/2009.14794, section 2.2"""

from collections.abc import Callable
from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_instances, check_numbers, check_types, given
from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.random_projection import RandomProjection
from linattn.ops.features import Features


@final
class GeneralizedFeatureMap(FeatureMap):
    """φ(x) = kernel(Ω x/d^¼) + epsilon with the Ω of `projection`, or kernel(x) + epsilon without one.

    A positive `epsilon` makes every key a little similar to every query, so that kernels with zeros do not ignore all
    keys; a negative one raises ValueError. `kernel` maps a tensor number by number; one that `ELEMENTWISE` names is
    faster as an `ElementwiseFeatureMap`, and a lambda cannot be pickled."""

    @check_types
    def __init__(
        self, kernel: Callable[[Tensor], Tensor], *, epsilon: float = 0.0, projection: RandomProjection | None = None
    ):
        super().__init__()
        check_numbers(epsilon=epsilon)
        check_instances(RandomProjection, **given(projection=projection))
        self.kernel = kernel
        self.epsilon = epsilon
        self.projection = projection

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        projected = x if self.projection is None else self.projection(x)
        return Features((self.kernel(projected) + self.epsilon).to(x.dtype))

    key = query

    def extra_repr(self) -> str:
        return f"{getattr(self.kernel, '__name__', self.kernel)}, epsilon={self.epsilon}"
