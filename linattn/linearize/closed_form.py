"""The values with which a layer's new parts begin, from a few batches and without a gradient: projections of queries
and keys to fewer channels that keep softmax's logits best, and the share of linear attention beside a window.

C_q are the second moments of a layer's queries and C_k those of its centred keys: a constant added to all keys changes
no softmax. With U Σ Vᵀ = SVD(C_q^½ C_k^½), the first r columns of P_q = C_q^−½ U √Σ and P_k = C_k^−½ V √Σ give the
logits of rank r that are nearest to the model's own in the mean over its queries and keys (Eckart and Young, 1936)."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linattn.attention import InnerAttention, SoftmaxAttention
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.integrations.transformers.documents import DOCUMENTS
from linattn.integrations.transformers.stock_attention.masks import attend_per_document
from linattn.linearize.observe import Attended, Batch, observe
from linattn.linearize.parts import LinearizedAttention

# directions with a smaller share of the largest moment are rounding errors
SMALLEST = 1e-10
# a share of 0 or 1 would have no gradient
LEAST_SHARE = 0.02


class Moments(NamedTuple):
    """Sums over tokens: of q qᵀ over the queries of each key head, of k kᵀ and of k, and the number of keys."""

    queries: Float[Tensor, "hk d d"]
    keys: Float[Tensor, "hk d d"]
    key_sum: Float[Tensor, "hk d"]
    num_queries: int
    num_keys: int

    def plus(self, other: "Moments") -> "Moments":
        pairs: Any = zip(self, other, strict=True)
        return Moments(*(own + theirs for own, theirs in pairs))

    def per_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return C_q, the moment of centred keys C_k, and the mean key."""
        mean = self.key_sum / self.num_keys
        centred = self.keys / self.num_keys - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return self.queries / self.num_queries, centred, mean


def project_closest(
    teacher: PreTrainedModel, layers: Mapping[str, LinearizedAttention], batches: Iterable[Batch]
) -> None:
    """Set the projections of the layers, by their names, from the teacher's queries and keys on some batches."""
    sums: dict[str, Moments] = {}

    def note(call: Attended) -> None:
        if call.name in layers:
            found = _moments(call)
            sums[call.name] = sums[call.name].plus(found) if call.name in sums else found

    for batch in batches:
        observe(teacher, batch, note)
    if missing := sorted(name for name in layers if name not in sums or not sums[name].num_keys):
        raise ValueError(f"key_dim needs batches that run {', '.join(missing)}, but there were none")
    for name, own in layers.items():
        _set_projections(own, sums[name])


def closest_projections(
    queries: Float[Tensor, "*b d d"], keys: Float[Tensor, "*b d d"], channels: int
) -> tuple[Float[Tensor, "*b d r"], Float[Tensor, "*b d r"]]:
    """Return P_q and P_k for the second moments of queries and of centred keys."""
    (root_q, inverse_q), (root_k, inverse_k) = _roots(queries), _roots(keys)
    u, sizes, v = torch.linalg.svd(root_q @ root_k)
    scale = sizes[..., None, :channels].sqrt()
    return inverse_q @ u[..., :channels] * scale, inverse_k @ v.mT[..., :channels] * scale


def _roots(c: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^½ and C^−½ on the directions that C has."""
    values, vectors = torch.linalg.eigh(c)
    seen = values > SMALLEST * values.amax(-1, keepdim=True)
    root = values.clamp(min=0).sqrt()
    inverse = torch.where(seen, 1 / root.masked_fill(~seen, 1), 0)
    root, inverse = ((vectors * x.unsqueeze(-2)) @ vectors.mT for x in (torch.where(seen, root, 0), inverse))
    return root, inverse


def _moments(call: Attended) -> Moments:
    q, k = call.present(call.q).double(), call.present(call.k).double()
    q = q.unflatten(0, (k.shape[0], -1)).flatten(1, 2)
    return Moments(q.mT @ q, k.mT @ k, k.sum(1), q.shape[1], k.shape[1])


@torch.no_grad()
def _set_projections(own: LinearizedAttention, moments: Moments) -> None:
    query_map, key_map = own.query_map, own.key_map
    assert isinstance(query_map, PerHeadLinear) and isinstance(key_map, PerHeadLinear)
    assert query_map.bias is not None and key_map.bias is not None
    queries, keys, mean = moments.per_token()
    d, r = query_map.weight.shape[1:]
    p_q, p_k = closest_projections(queries, keys, r)
    # attention divides the products of r channels by √r, where the model divides those of d by √d
    p_q, p_k = (p * (r / d) ** 0.25 for p in (p_q, p_k))
    query_map.weight.copy_(p_q.repeat_interleave(own.spec.num_heads // own.spec.num_key_heads, 0))
    query_map.bias.zero_()
    key_map.weight.copy_(p_k)
    key_map.bias.copy_(-mean.unsqueeze(-2) @ p_k)


@torch.no_grad()
def share_closest(
    teacher: PreTrainedModel, layers: Mapping[str, LinearizedAttention], batches: Iterable[Batch]
) -> None:
    """Let each head with a window begin with the share of linear attention, from 2 to 98 %, that is nearest to softmax
    on the batches: argmin_s Σ ‖softmax − local − s (linear − local)‖²."""
    sums: dict[str, Tensor] = {}

    def note(call: Attended) -> None:
        own = layers.get(call.name)
        if own is not None and own.share is not None:
            sums[call.name] = sums.get(call.name, 0) + _share_products(own, call)

    for batch in batches:
        observe(teacher, batch, note)
    for name, (covered, apart) in sums.items():
        # a linear part that is equal to the window may have any share
        nearest, share = covered / apart.masked_fill(apart == 0, 1), layers[name].share
        assert share is not None
        share.bias.copy_(nearest.clamp(LEAST_SHARE, 1 - LEAST_SHARE).logit())


def _share_products(own: LinearizedAttention, call: Attended) -> Float[Tensor, "2 h"]:
    """Return Σ (softmax − local)·(linear − local) and Σ ‖linear − local‖² per head."""
    assert own.window is not None
    b, _, n, _ = call.q.shape
    gates, _ = own.prepare(call.q.new_zeros(b, n, own.spec.dim), None, None)[1]
    q, k = call.q * call.scaling * own.spec.head_dim**0.5, call.k
    exact = _attend(SoftmaxAttention(causal=call.causal), call, q, k)
    near = _attend(own.window, call, q, k)
    far = _attend(own.inner, call, own.query_map(q), own.key_map(k), gates) - near
    return torch.stack([((exact - near) * far).sum((1, 2)), far.square().sum((1, 2))])


def _attend(inner: InnerAttention, call: Attended, q: Tensor, k: Tensor, gates: Any = None) -> Float[Tensor, "h t dv"]:
    """Return what the present tokens of each head get."""
    if call.mask is not None and call.mask.dtype == DOCUMENTS:
        y = attend_per_document(inner, q, k, call.v, call.mask, gates)
    else:
        y = inner(q, k, call.v, key_mask=None if call.mask is None else call.mask.unsqueeze(1), gates=gates)
    return call.present(y).double()
