"""Diagnostics: how well a feature map approximates softmax on given queries and keys, per head, compared with uniform
attention. An error that is no smaller than that of uniform attention is no approximation, however small it looks."""

import math
from dataclasses import dataclass, field, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.checks import checked_heads
from linattn.checks import check_types
from linattn.feature_maps.base import FeatureMap, checked_feature_map
from linattn.feature_maps.elementwise import ElementwiseFeatureMap
from linattn.ops.features import checked_features
from linattn.ops.numerics import accumulator, divide, without_autocast, zero_masked
from linattn.ops.tokens.compaction import per_query_head
from linattn.types import KeyMask, Keys, Queries, Values

__all__ = ["SoftmaxComparison", "compare_with_softmax"]

# number of weights, of all heads together, in memory at a time
_WEIGHTS_AT_A_TIME = 2**22
_SMALL = math.log(1e-4)

PerHead = Float[Tensor, " h"]
# of a chunk of c queries
Weights = Float[Tensor, "b h c m"]
Visible = Bool[Tensor, "b h c m"]


@dataclass(frozen=True, eq=False)
class SoftmaxComparison:
    """Figures per head, averaged over queries. Weights are P for softmax, A for the map named `feature_map`, U for
    uniform attention.

    `output_error` is ‖(A − P) V‖/‖P V‖ in the Frobenius norm, or without values ‖A − P‖/‖P‖, the expectation for
    independent values of mean zero; `total_variation` is Σ_j |A_ij − P_ij|/2; `divergence` is KL(P‖A) in nats, infinite
    where A has no weight for a key that softmax weighs. `uniform_output_error`, `uniform_total_variation` and
    `uniform_divergence` are those of U instead of A. `entropy`, of A with negative weights as zero, and
    `softmax_entropy`, of P, are in nats. `negative_weight` is the sum of the absolute values of A's negative weights.
    `small_features` is the share of the keys' features below 1e-4 of the largest of their sequence and head, which
    hardly contribute. `norm_product` is ‖q‖‖k‖/√d, root mean square: the size that softmax's exponents may reach."""

    feature_map: str
    output_error: PerHead = field(metadata={"title": "error"})
    uniform_output_error: PerHead = field(metadata={"title": "uniform"})
    total_variation: PerHead = field(metadata={"title": "variation"})
    uniform_total_variation: PerHead = field(metadata={"title": "uniform"})
    divergence: PerHead = field(metadata={"title": "KL"})
    uniform_divergence: PerHead = field(metadata={"title": "uniform"})
    entropy: PerHead = field(metadata={"title": "entropy"})
    softmax_entropy: PerHead = field(metadata={"title": "softmax"})
    negative_weight: PerHead = field(metadata={"title": "negative"})
    small_features: PerHead = field(metadata={"title": "small φ(k)"})
    norm_product: PerHead = field(metadata={"title": "|q||k|/√d"})

    @property
    def verdict(self) -> str:
        """Judge the map in one sentence, with the error of uniform attention beside its own."""
        error, uniform = self.output_error.mean().item(), self.uniform_output_error.mean().item()
        figures = f"its output error is {error:.2g}, uniform attention would give {uniform:.2g}."
        heads, better = len(self.output_error), int((self.output_error < 0.9 * self.uniform_output_error).sum())
        if better == 0:
            return f"{self.feature_map} is no better than uniform attention on these queries and keys: {figures}"
        if better == heads and error < min(0.1, uniform / 2):
            return f"{self.feature_map} is close to softmax on these queries and keys: {figures}"
        return f"{self.feature_map} beats uniform attention in {better} of {heads} heads, but is not softmax: {figures}"

    def __str__(self) -> str:
        columns = [(each.metadata["title"], getattr(self, each.name)) for each in fields(self)[1:]]
        lines = ["head  " + "  ".join(f"{title:>8}" for title, _ in columns)]
        for row in [*range(len(self.output_error)), "mean"]:
            figures = [(title, x.mean() if row == "mean" else x[row]) for title, x in columns]
            lines.append(f"{row:<4}  " + "  ".join(f"{x.item():>{max(8, len(title))}.3g}" for title, x in figures))
        return "\n".join([*lines, self.verdict])


@torch.no_grad()
@check_types
def compare_with_softmax(
    q: Queries,
    k: Keys,
    feature_map: FeatureMap,
    *,
    v: Values | None = None,
    causal: bool = False,
    key_mask: KeyMask = None,
) -> SoftmaxComparison:
    """Compare a `feature_map` with softmax on queries `q` and keys `k`: attention weights and, if there are values `v`,
    outputs, over all keys or, if `causal`, over j ≤ i. `key_mask` is True for present keys (None: all).

    Takes quadratic time, but linear memory. Queries that see no key are left out; if causal, so are those of masked
    tokens. Random maps are compared with their current projection, learned ones with their current weights.

    Raises ValueError for shapes that do not fit, and for a head in which no query sees a key."""
    feature_map = checked_feature_map(feature_map, FeatureMap)
    q, k, values, _ = checked_heads(q, k, k if v is None else v, key_mask)
    if 0 in (q.numel(), k.numel()):
        raise ValueError(f"an empty tensor has no weights, but q is {tuple(q.shape)} and k is {tuple(k.shape)}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"a causal comparison needs a query for every key, not {q.shape[2]} for {k.shape[2]}")
    with without_autocast(q):
        return _compared(q, k, None if v is None else values, feature_map, causal, key_mask)


def _compared(
    q: Queries, k: Keys, v: Values | None, feature_map: FeatureMap, causal: bool, key_mask: KeyMask
) -> SoftmaxComparison:
    dtype, group = accumulator(q.dtype), q.shape[1] // k.shape[1]
    q, k = q.to(dtype), zero_masked(k.to(dtype), key_mask)
    if causal and key_mask is not None:
        q = zero_masked(q, per_query_head(key_mask, q.shape[1]))
    queries = checked_features("queries", feature_map.query(q))
    by_key = feature_map.normalize == "keys"
    # weights that are normalised per query do not depend on its scale
    phi_q = queries.value() if by_key else queries.evaluated().x
    phi_k, log_scale, _ = checked_features("keys", feature_map.key(k)).evaluated()
    log_scale = k.new_zeros(k.shape[:-1]) if log_scale is None else log_scale
    present = torch.ones_like(log_scale, dtype=torch.bool) if key_mask is None else key_mask.expand_as(log_scale)
    k, phi_k, log_scale, present = (x.repeat_interleave(group, 1) for x in (k, phi_k, log_scale, present))
    v = None if v is None else zero_masked(v.to(dtype), key_mask).repeat_interleave(group, 1)
    total = torch.zeros(11, q.shape[1], dtype=torch.float64)
    size = max(1, _WEIGHTS_AT_A_TIME // (q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], size):
        chunk = slice(start, min(q.shape[2], start + size))
        visible = _visible(present, chunk, causal)
        softmax = _divided_by_sum(_relative(q[:, :, chunk] @ k.mT / math.sqrt(q.shape[-1]), visible))
        scale = _relative(log_scale.unsqueeze(-2), visible)
        weights = (_weights_by_key if by_key else _weights_by_query)(phi_q[:, :, chunk], phi_k, scale)
        total += _sums(softmax, weights, visible, v).double().cpu()
    count, error, uniform_error, norm, *means = total
    if not count.all():
        raise ValueError(f"no query of head {int(count.argmin())} sees a key, so there is nothing to compare")
    name = feature_map.function if isinstance(feature_map, ElementwiseFeatureMap) else type(feature_map).__name__
    return SoftmaxComparison(
        name,
        (error / norm).sqrt(),
        (uniform_error / norm).sqrt(),
        *(x / count for x in means),
        small_features=_small_features(phi_k, log_scale, present).cpu(),
        norm_product=(_norm(q, present if causal else None) * _norm(k, present) / math.sqrt(q.shape[-1])).cpu(),
    )


def _visible(present: Bool[Tensor, "b h m"], chunk: slice, causal: bool) -> Visible:
    """Return the mask of the keys that each query of a `chunk` sees. If causal, queries at masked tokens see none."""
    visible = present.unsqueeze(-2).expand(-1, -1, chunk.stop - chunk.start, -1)
    return visible.tril(chunk.start) & present[..., chunk].unsqueeze(-1) if causal else visible


def _relative(log_scale: Float[Tensor, "b h #c m"], visible: Visible) -> Weights:
    """Return exp(log_scale) in units of each query's largest visible scale, zero for keys that it does not see."""
    scale = torch.where(visible, log_scale, -torch.inf)
    largest = scale.amax(-1, keepdim=True)
    return (scale - largest.masked_fill(largest == -torch.inf, 0)).exp()


def _divided_by_sum(similarity: Weights) -> Weights:
    return divide(similarity, similarity.sum(-1, keepdim=True))


def _weights_by_query(phi_q: Float[Tensor, "b h c f"], phi_k: Float[Tensor, "b h m f"], scale: Weights) -> Weights:
    return _divided_by_sum(phi_q @ phi_k.mT * scale)


def _weights_by_key(phi_q: Float[Tensor, "b h c f"], phi_k: Float[Tensor, "b h m f"], scale: Weights) -> Weights:
    """s_ij Σ_f φ(q_i)_f φ(k_j)_f / z_if, z_if = Σ_j s_ij φ(k_j)_f; the `scale` s is 0 for keys that i does not see."""
    z = scale @ phi_k
    # a subnormal sum has lost its digits, and its inverse may be infinite
    return divide(phi_q, z.masked_fill(z < torch.finfo(z.dtype).tiny, 0)) @ phi_k.mT * scale


def _sums(
    softmax: Weights, weights: Weights, visible: Visible, v: Float[Tensor, "b h m dv"] | None
) -> Float[Tensor, "figures h"]:
    """Return sums per head over the batch and a chunk of queries, from the `weights` of `softmax` and of the map: the
    number of queries that see a key, the squared errors of the map and of uniform attention, the squares of softmax's
    outputs, then, in the order of `SoftmaxComparison`, the figures that it averages over queries."""
    keys = visible.sum(-1, keepdim=True, dtype=softmax.dtype)
    uniform = visible / keys.clamp(min=1)
    entropy = torch.special.entr(softmax).sum(-1)
    outputs = [x if v is None else x @ v for x in (weights - softmax, uniform - softmax, softmax)]
    # where softmax has no weight, the map needs none
    log_ratio = torch.where(softmax > 0, softmax.log() - weights.clamp(min=0).log(), 0)
    figures = [
        (keys > 0).squeeze(-1),
        *(x.square().sum(-1) for x in outputs),
        (weights - softmax).abs().sum(-1) / 2,
        (uniform - softmax).abs().sum(-1) / 2,
        (softmax * log_ratio).sum(-1),
        keys.clamp(min=1).log().squeeze(-1) - entropy,
        torch.special.entr(weights.clamp(min=0)).sum(-1),
        entropy,
        -weights.clamp(max=0).sum(-1),
    ]
    return torch.stack([x.to(softmax.dtype).sum((0, 2)) for x in figures])


def _small_features(
    phi_k: Float[Tensor, "b h m f"], log_scale: Float[Tensor, "b h m"], present: Bool[Tensor, "b h m"]
) -> PerHead:
    size = phi_k.abs().log() + log_scale.masked_fill(~present, -torch.inf).unsqueeze(-1)
    small = (size < size.amax((-2, -1), keepdim=True) + _SMALL) & present.unsqueeze(-1)
    return small.sum((0, 2, 3)) / (present.sum((0, 2)) * phi_k.shape[-1])


def _norm(x: Float[Tensor, "b h n d"], present: Bool[Tensor, "b h n"] | None) -> PerHead:
    """Return the root mean square of the lengths of the vectors that are `present` (None: all)."""
    square = x.square().sum(-1)
    return (square.mean((0, 2)) if present is None else (square * present).sum((0, 2)) / present.sum((0, 2))).sqrt()
