"""Plain inner products with the scale of softmax attention, which retention has too: q·k / √d.
Sun et al., https://arxiv.org/abs/2307.08621, section 2.2"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, Features


@final
class ScaledFeatureMap(FeatureMap):
    """φ(q) = q / √d and φ(k) = k, so that φ(q)·φ(k) = q·k / √d. Similarities may be negative."""

    normalize = None

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        return Features(x * x.shape[-1] ** -0.5)

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return Features(x)
