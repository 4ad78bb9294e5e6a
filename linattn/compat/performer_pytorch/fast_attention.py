"""performer-pytorch's attention on split heads, out of our feature maps."""

from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.attention import InnerAttention, LinearAttention
from linattn.attention.floored_favor import FlooredFavorAttention
from linattn.compat.options import check_options
from linattn.compat.performer_pytorch.options import RULES
from linattn.feature_maps import (
    EfficientFeatureMap,
    FavorFeatureMap,
    GeneralizedFeatureMap,
    RandomProjection,
    redraw_features_,
)
from linattn.feature_maps.random_projection import default_num_features
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


@final
class FastAttention(InnerAttention):
    """FAVOR+; or, `generalized_attention`, kernel_fn(Ωu) + kernel_epsilon; or, `no_projection`, Efficient Attention.

    `softmax_epsilon` is the floor under FAVOR+'s features, which performer-pytorch has as the eps of `softmax_kernel`;
    with 0 there is none. An option that has no effect, such as `kernel_fn` without `generalized_attention`, is an error
    unless it is the default."""

    def __init__(
        self,
        dim_heads: int,
        nb_features: int | None = None,
        ortho_scaling: int = 0,
        causal: bool = False,
        generalized_attention: bool = False,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        no_projection: bool = False,
        *,
        softmax_epsilon: float = 1e-4,
        kernel_epsilon: float = 1e-3,
    ):
        check_options(FastAttention, RULES, locals())
        super().__init__()
        self.dim_heads, self.causal = dim_heads, causal
        if no_projection:
            # the causal form normalises outputs as performer-pytorch does; not causal, keys are a softmax over tokens
            normalize = "output" if causal else "keys"
            self.inner = LinearAttention(EfficientFeatureMap(), causal=causal, normalize=normalize)
        elif generalized_attention:
            rows = default_num_features(dim_heads) if nb_features is None else nb_features
            projection = RandomProjection(dim_heads, rows, scaling=ortho_scaling)
            feature_map = GeneralizedFeatureMap(kernel_fn, epsilon=kernel_epsilon, projection=projection)
            self.inner = LinearAttention(feature_map, causal=causal)
        else:
            favor = FavorFeatureMap(dim_heads, nb_features, scaling=ortho_scaling)
            self.inner = _favor(favor, softmax_epsilon, causal)
        self.state_kind = self.inner.state_kind

    @property
    def projection_matrix(self) -> Float[Tensor, "f d"] | None:
        """The random rows Ω; None if there is no projection."""
        return next((part.rows for part in self.modules() if isinstance(part, RandomProjection)), None)

    @property
    def nb_features(self) -> int:
        return self.dim_heads if self.projection_matrix is None else len(self.projection_matrix)

    def redraw_projection_matrix(self, device: torch.device | str | None = None) -> None:
        """Resample the rows in place. A `device` must be the one where they are: they are drawn on the CPU anyway, so
        that every device has the same."""
        rows = self.projection_matrix
        if device is not None and rows is not None and torch.device(device).type != rows.device.type:
            raise ValueError(f"the projection matrix is on {rows.device} and cannot be redrawn on {device}")
        redraw_features_(self)

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        return self.inner(q, k, v, key_mask=key_mask)

    def _extend(self, q: Queries, k: Keys, v: Values, state: Any, key_mask: KeyMask) -> tuple[Outputs, Any]:
        return self.inner.extend(q, k, v, state, key_mask=key_mask)

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> Any:
        return self.inner.summarize(k, v, key_mask=key_mask)

    def read(self, q: Queries, summary: Any) -> Outputs:
        return self.inner.read(q, summary)


def _favor(feature_map: FavorFeatureMap, epsilon: float, causal: bool) -> InnerAttention:
    if epsilon == 0:
        return LinearAttention(feature_map, causal=causal)
    return FlooredFavorAttention(feature_map, epsilon=epsilon, causal=causal)
