"""Values in closed form, from a few batches and without gradients: projections of queries and keys to fewer channels
that keep softmax's logits best, and the share of linear attention beside a window.

C_q are the second moments of a layer's queries and C_k those of its centred keys: a constant that is added to all keys
does not change softmax. With U Σ Vᵀ = SVD(C_q^½ C_k^½), the first r columns of P_q = C_q^−½ U √Σ and P_k = C_k^−½ V √Σ
give the logits of rank r with the least mean square error over all queries and keys (Eckart and Young, 1936)."""

from collections.abc import Callable, Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linattn.attention import SoftmaxAttention
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.linearize.attention import LinearizedAttention
from linattn.linearize.calls import AttentionCall, Batch, observe

# directions with a smaller share of the largest moment are rounding errors
SMALLEST = 1e-10
# a share of 0 or 1 would have no gradient
LEAST_SHARE = 0.02


@torch.no_grad()
def set_projections(
    teacher: PreTrainedModel, layers: Mapping[str, LinearizedAttention], batches: Iterable[Batch]
) -> None:
    """Set the projections of the layers that have some, by name, from the teacher's queries and keys on the batches."""
    layers = {name: own for name, own in layers.items() if own.spec.key_dim is not None}
    if not layers:
        return
    sums = _sums(teacher, batches, lambda call: _moments(call) if call.name in layers else None)
    if missing := sorted(name for name in layers if name not in sums or not sums[name][-1]):
        raise ValueError(f"key_dim needs batches that run {', '.join(missing)}, but there were none")
    for name, own in layers.items():
        query_map, key_map = own.query_map, own.key_map
        assert isinstance(query_map, PerHeadLinear) and isinstance(key_map, PerHeadLinear)
        assert query_map.bias is not None and key_map.bias is not None
        queries, keys, key_sum, num_queries, num_keys = sums[name]
        mean = key_sum / num_keys
        centred = keys / num_keys - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        d, r = query_map.weight.shape[1:]
        # attention divides the products of r channels by √r, where the model divides those of d by √d
        scale = (r / d) ** 0.25
        p_q, p_k = (scale * p for p in closest_projections(queries / num_queries, centred, r))
        query_map.weight.copy_(p_q.repeat_interleave(own.spec.num_heads // own.spec.num_key_heads, 0))
        query_map.bias.zero_()
        key_map.weight.copy_(p_k)
        key_map.bias.copy_(-mean.unsqueeze(-2) @ p_k)


def closest_projections(
    queries: Float[Tensor, "*b d d"], keys: Float[Tensor, "*b d d"], channels: int
) -> tuple[Float[Tensor, "*b d r"], Float[Tensor, "*b d r"]]:
    """Return P_q and P_k, with r = `channels`, for the second moments of `queries` and of centred `keys`."""
    (root_q, inverse_q), (root_k, inverse_k) = _roots(queries), _roots(keys)
    u, sizes, v = torch.linalg.svd(root_q @ root_k)
    scale = sizes[..., None, :channels].sqrt()
    return inverse_q @ u[..., :channels] * scale, inverse_k @ v.mT[..., :channels] * scale


def _roots(c: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^½ and C^−½, both zero in the directions in which C is zero."""
    moments, vectors = torch.linalg.eigh(c)
    positive = moments > SMALLEST * moments.amax(-1, keepdim=True)
    root = torch.where(positive, moments, 0).sqrt()
    inverse = torch.where(positive, 1 / root, 0)
    return (vectors * root.unsqueeze(-2)) @ vectors.mT, (vectors * inverse.unsqueeze(-2)) @ vectors.mT


def _moments(call: AttentionCall) -> list[Tensor | int]:
    """Return Σ q qᵀ over the queries of each key head, Σ k kᵀ, Σ k, and the numbers of queries and of keys."""
    q, k = call.present_tokens(call.q).double(), call.present_tokens(call.k).double()
    q = q.unflatten(0, (k.shape[0], -1)).flatten(1, 2)
    return [q.mT @ q, k.mT @ k, k.sum(1), q.shape[1], k.shape[1]]


@torch.no_grad()
def set_shares(teacher: PreTrainedModel, layers: Mapping[str, LinearizedAttention], batches: Iterable[Batch]) -> None:
    """Set the share of linear attention in each head with a window to the one, from 2 to 98 %, that is nearest to
    softmax on the batches: argmin_s Σ ‖softmax − local − s (linear − local)‖²."""

    shares = {name: own.share for name, own in layers.items() if own.share is not None}
    if not shares:
        return
    sums = _sums(
        teacher, batches, lambda call: _share_products(layers[call.name], call) if call.name in shares else None
    )
    for name, (product, square) in sums.items():
        # a linear part that is equal to the window may have any share
        nearest = product / square.masked_fill(square == 0, 1)
        shares[name].bias.copy_(nearest.clamp(LEAST_SHARE, 1 - LEAST_SHARE).logit())


def _share_products(own: LinearizedAttention, call: AttentionCall) -> list[Tensor]:
    """Return Σ (softmax − local)·(linear − local) and Σ ‖linear − local‖² per head."""
    assert own.window is not None
    b, _, n, _ = call.q.shape
    _, gates = own.prepare(call.q.new_zeros(b, n, own.spec.dim), None, None)
    assert gates is not None
    q, k, v = call.scaled_queries(), call.k, call.v
    exact = call.attend(SoftmaxAttention(causal=call.causal), q, k, v)
    local = call.attend(own.window, q, k, v)
    linear = call.attend(own.inner, own.query_map(q), own.key_map(k), v, gates.inner)
    exact, local, linear = (call.present_tokens(y).double() for y in (exact, local, linear))
    return [((exact - local) * (linear - local)).sum((1, 2)), (linear - local).square().sum((1, 2))]


def _sums(
    teacher: PreTrainedModel, batches: Iterable[Batch], terms: Callable[[AttentionCall], list | None]
) -> dict[str, list]:
    """Return the sums of `terms(call)` over all calls of each module, by its name. Terms that are None are left out."""
    sums: dict[str, list] = {}

    def add(call: AttentionCall) -> None:
        if (new := terms(call)) is not None:
            old = sums.get(call.name, len(new) * [0])
            sums[call.name] = [a + b for a, b in zip(old, new, strict=True)]

    for batch in batches:
        observe(teacher, batch, add)
    return sums
