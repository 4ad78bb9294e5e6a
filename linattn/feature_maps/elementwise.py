"""Feature maps that act on each number alone: elu(x) + 1, ReLU, squared ReLU, softplus, sigmoid, or none. The operator
knows them by name and applies them in its loop. Katharopoulos et al., https://arxiv.org/abs/2006.16236, eq. 7"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.names import unknown_name


@final
class ElementwiseFeatureMap(FeatureMap):
    """φ(x) = ELEMENTWISE[name](x), the same for queries and keys.

    With "exp" the features overflow where x does not fit its dtype's exponential; `ExpFeatureMap` has no such limit."""

    def __init__(self, name: str):
        super().__init__()
        if name not in ELEMENTWISE:
            raise unknown_name("an elementwise feature map", name, ELEMENTWISE)
        self.elementwise = name

    def query(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        assert self.elementwise is not None
        return ELEMENTWISE[self.elementwise].function(x)

    def key(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return self.query(x)

    def extra_repr(self) -> str:
        return repr(self.elementwise)
