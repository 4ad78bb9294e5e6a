"""Feature maps of each number alone: elu(x) + 1, ReLU, squared ReLU, softplus, sigmoid, exp or x, computed inside the
operator; and a map that divides queries by √d. Katharopoulos et al., https://arxiv.org/abs/2006.16236, eq. 7"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_types
from linattn.feature_maps.base import FeatureMap
from linattn.names import unknown_name
from linattn.ops.elementwise import ELEMENTWISE, SYNONYMS
from linattn.ops.features import Features


@final
class ElementwiseFeatureMap(FeatureMap):
    """φ(x) = ELEMENTWISE[function](x), the same for queries and keys. Any other `function` raises ValueError.

    With "exp", φ(q)·φ(k) = Σ_c exp(q_c + k_c), which is not softmax's exp(q·k). Any x is in range: channels of a key
    count as zero from about 57 below the largest of all keys, channels of a query from 87 below its largest."""

    @check_types
    def __init__(self, function: str):
        super().__init__()
        if function not in ELEMENTWISE:
            raise unknown_name("an elementwise feature map", function, ELEMENTWISE, SYNONYMS)
        self.function = function

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        return Features(x, function=self.function)

    key = query

    def extra_repr(self) -> str:
        return repr(self.function)


@final
class ScaledFeatureMap(FeatureMap):
    """φ(q) = q / √d and φ(k) = k, so that φ(q)·φ(k) = q·k / √d, as in softmax attention and in retention: Sun et al.,
    https://arxiv.org/abs/2307.08621, section 2.2. Similarities may be negative."""

    normalize = None
    scales_products = True

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        return Features(x * x.shape[-1] ** -0.5)

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return Features(x)
