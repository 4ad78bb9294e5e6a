"""Diagnostics: how well a feature map approximates softmax on given queries and keys, per head, compared with uniform
attention. An error that is no smaller than that of uniform attention is no approximation, however small it looks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, checked_feature_map
from linattn.feature_maps.elementwise import ElementwiseFeatureMap
from linattn.ops.backends.base import accumulator, divide

# number of weights, of all heads together, in memory at a time
_WEIGHTS_AT_A_TIME = 2**22
_SMALL = math.log(1e-4)


@dataclass(frozen=True, eq=False)
class SoftmaxComparison:
    """Figures per head, averaged over queries. Weights are P for softmax, A for the map, U for uniform attention.

    Without values an output error is ‖A − P‖/‖P‖ in the Frobenius norm, the expectation for independent values of mean
    zero. Entropies are in nats; that of A counts negative weights as zero. The divergence KL(P‖A) is infinite where A
    has no weight for a key that softmax weighs."""

    feature_map: str
    output_error: Float[Tensor, " h"]
    uniform_output_error: Float[Tensor, " h"]
    total_variation: Float[Tensor, " h"]
    uniform_total_variation: Float[Tensor, " h"]
    divergence: Float[Tensor, " h"]
    uniform_divergence: Float[Tensor, " h"]
    entropy: Float[Tensor, " h"]
    softmax_entropy: Float[Tensor, " h"]
    negative_weight: Float[Tensor, " h"]
    """The sum of the absolute values of negative weights."""
    small_features: Float[Tensor, " h"]
    """The share of the keys' features below 1e-4 of the head's largest, which hardly contribute."""
    norm_product: Float[Tensor, " h"]
    """‖q‖‖k‖/√d, root mean square: the size that softmax's exponents may reach."""

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
        columns = (
            ("error", self.output_error),
            ("uniform", self.uniform_output_error),
            ("variation", self.total_variation),
            ("uniform", self.uniform_total_variation),
            ("KL", self.divergence),
            ("uniform", self.uniform_divergence),
            ("entropy", self.entropy),
            ("softmax", self.softmax_entropy),
            ("negative", self.negative_weight),
            ("small φ(k)", self.small_features),
            ("|q||k|/√d", self.norm_product),
        )
        lines = ["head  " + "  ".join(f"{title:>8}" for title, _ in columns)]
        for head, *figures in zip(range(len(self.output_error)), *(x.tolist() for _, x in columns), strict=True):
            lines.append(_line(str(head), columns, figures))
        lines.append(_line("mean", columns, [x.mean().item() for _, x in columns]))
        return "\n".join([*lines, self.verdict])


def _line(label: str, columns: tuple[tuple[str, Tensor], ...], figures: list[float]) -> str:
    texts = (f"{figure:>{max(8, len(title))}.3g}" for (title, _), figure in zip(columns, figures, strict=True))
    return f"{label:<4}  " + "  ".join(texts)


@torch.no_grad()
def compare_with_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk m d"],
    feature_map: FeatureMap,
    *,
    v: Float[Tensor, "b hk m dv"] | None = None,
    causal: bool = False,
    key_mask: Bool[Tensor, "#b #hk m"] | None = None,
) -> SoftmaxComparison:
    """Compare a feature map's attention weights, and the outputs if there are values, with those of softmax.

    Takes quadratic time, but linear memory. Queries that see no key are left out; if causal, so are those of masked
    tokens. Random maps are compared with their current projection, learned ones with their current weights.

    Raises ValueError for shapes that do not fit."""
    feature_map = checked_feature_map(feature_map, FeatureMap)
    _check(q, k, v, causal)
    dtype, group = accumulator(q.dtype), q.shape[1] // k.shape[1]
    q, k = q.to(dtype), k.to(dtype)
    queries, by_key = feature_map.query(q), feature_map.normalize == "keys"
    # weights that are normalised per query do not depend on its scale
    phi_q = queries.value() if by_key else queries.evaluated().x
    phi_k, log_scale, _ = feature_map.key(k).evaluated()
    log_scale = k.new_zeros(k.shape[:-1]) if log_scale is None else log_scale
    present = torch.ones_like(log_scale, dtype=torch.bool) if key_mask is None else key_mask.expand_as(log_scale)
    k, phi_k, log_scale, present = (x.repeat_interleave(group, 1) for x in (k, phi_k, log_scale, present))
    v = None if v is None else v.to(dtype).repeat_interleave(group, 1)
    map_weights = _weights_by_key if by_key else _weights_by_query
    total = torch.zeros(11, q.shape[1], dtype=torch.float64)
    for rows in _chunks(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]):
        visible = _visible(present, rows, causal)
        exponent = q[:, :, rows] @ k.mT / math.sqrt(q.shape[-1])
        softmax = _normalized(torch.ones_like(exponent), exponent, visible)
        weights = map_weights(phi_q[:, :, rows], phi_k, log_scale, visible)
        total += _sums(softmax, weights, visible, v).double().cpu()
    features = _small_features(phi_k, log_scale, present).cpu()
    name = feature_map.function if isinstance(feature_map, ElementwiseFeatureMap) else type(feature_map).__name__
    return _report(name, total, features, _norm_product(q, k, present).cpu())


def _check(q: Tensor, k: Tensor, v: Tensor | None, causal: bool) -> None:
    shapes = f"q is {tuple(q.shape)} and k is {tuple(k.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or not q.numel() * k.numel():
        raise ValueError(f"q must be (b, h, n, d) and k (b, hk, m, d), none of them empty, but {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the number of key heads must divide that of query heads, but {shapes}")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"a causal comparison needs a query for every key, but {shapes}")
    if v is not None and v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"every key must have a value, but k is {tuple(k.shape)} and v is {tuple(v.shape)}")


def _chunks(n: int, weights_per_query: int) -> Iterator[slice]:
    size = max(1, _WEIGHTS_AT_A_TIME // weights_per_query)
    for start in range(0, n, size):
        yield slice(start, min(n, start + size))


def _visible(present: Bool[Tensor, "b h m"], rows: slice, causal: bool) -> Bool[Tensor, "b h c m"]:
    """Return the mask of the keys that each query of the chunk sees, all False for queries that are left out."""
    visible = present.unsqueeze(-2).expand(-1, -1, rows.stop - rows.start, -1)
    return visible.tril(rows.start) & present[..., rows].unsqueeze(-1) if causal else visible


def _normalized(
    similarity: Float[Tensor, "b h c m"], log_scale: Float[Tensor, "b h #c m"], visible: Bool[Tensor, "b h c m"]
) -> Float[Tensor, "b h c m"]:
    """Return similarity · exp(log_scale) divided by its sum; the largest visible scale is subtracted first."""
    scale = torch.where(visible, log_scale, -torch.inf)
    largest = scale.amax(-1, keepdim=True)
    similarity = similarity * (scale - largest.masked_fill(largest == -torch.inf, 0)).exp()
    return divide(similarity, similarity.sum(-1, keepdim=True))


def _weights_by_query(
    phi_q: Float[Tensor, "b h c f"],
    phi_k: Float[Tensor, "b h m f"],
    log_scale: Float[Tensor, "b h m"],
    visible: Bool[Tensor, "b h c m"],
) -> Float[Tensor, "b h c m"]:
    return _normalized(phi_q @ phi_k.mT, log_scale.unsqueeze(-2), visible)


def _weights_by_key(
    phi_q: Float[Tensor, "b h c f"],
    phi_k: Float[Tensor, "b h m f"],
    log_scale: Float[Tensor, "b h m"],
    visible: Bool[Tensor, "b h c m"],
) -> Float[Tensor, "b h c m"]:
    """Σ_f φ(q_i)_f φ(k_j)_f / z_if, where z_if sums φ(k_j)_f over the keys that query i sees."""
    scale = torch.where(visible, log_scale.unsqueeze(-2), -torch.inf)
    largest = scale.amax(-1, keepdim=True)
    scale = (scale - largest.masked_fill(largest == -torch.inf, 0)).exp()
    z = scale @ phi_k
    # a subnormal sum has lost its digits, and its inverse may be infinite
    return divide(phi_q, z.masked_fill(z < torch.finfo(z.dtype).tiny, 0)) @ phi_k.mT * scale


def _sums(
    softmax: Float[Tensor, "b h c m"],
    weights: Float[Tensor, "b h c m"],
    visible: Bool[Tensor, "b h c m"],
    v: Float[Tensor, "b h m dv"] | None,
) -> Float[Tensor, "figures h"]:
    """Return each figure of `_report` per head, summed over the batch and the chunk's queries."""
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
) -> Float[Tensor, " h"]:
    size = phi_k.abs().log() + log_scale.masked_fill(~present, -torch.inf).unsqueeze(-1)
    small = (size < size.amax((-2, -1), keepdim=True) + _SMALL) & present.unsqueeze(-1)
    return small.sum((0, 2, 3)) / (present.sum((0, 2)) * phi_k.shape[-1])


def _norm_product(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], present: Bool[Tensor, "b h m"]
) -> Float[Tensor, " h"]:
    q_norm = q.square().sum(-1).mean((0, 2)).sqrt()
    k_norm = ((k.square().sum(-1) * present).sum((0, 2)) / present.sum((0, 2))).sqrt()
    return q_norm * k_norm / math.sqrt(q.shape[-1])


def _report(name: str, total: Float[Tensor, "figures h"], small: Tensor, norm_product: Tensor) -> SoftmaxComparison:
    count, error, uniform_error, size, *means = total
    variation, uniform_variation, kl, uniform_kl, entropy, softmax_entropy, negative = (x / count for x in means)
    return SoftmaxComparison(
        feature_map=name,
        output_error=(error / size).sqrt(),
        uniform_output_error=(uniform_error / size).sqrt(),
        total_variation=variation,
        uniform_total_variation=uniform_variation,
        divergence=kl,
        uniform_divergence=uniform_kl,
        entropy=entropy,
        softmax_entropy=softmax_entropy,
        negative_weight=negative,
        small_features=small,
        norm_product=norm_product,
    )
