"""Attention as a function of raw queries, keys and values."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.linear import LinearAttention
from linattn.attention.named import shared_attention, untrained_attention
from linattn.checks import check_tensors, check_types, given
from linattn.feature_maps.base import FeatureMap
from linattn.ops.linear import broadcast
from linattn.ops.numerics import align


@check_types
def attend(
    q: Float[Tensor, "*b n d"],
    k: Float[Tensor, "*b2 m d"],
    v: Float[Tensor, "*b3 m dv"],
    method: str | FeatureMap | InnerAttention = "elu",
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*masked m"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "*b4 n dv"]:
    """Attend by any method on raw `q`, `k` and `v`, which are laid out as for `scaled_dot_product_attention`.

    Heads precede tokens, (…, h, n, d), and what precedes the heads broadcasts. k and v may have fewer heads, each for
    consecutive heads of q. `method` is a name in `ATTENTIONS` that needs no training, a mixture of such names, a
    feature map, or an inner attention, whose `causal` must equal `is_causal`. If `is_causal`, a query sees the keys up
    to its own. Random features come from a fixed seed. `key_mask` is True for keys that are present; it is (…, h, m),
    or (b, m) for all heads.

    `attn_mask` is a boolean mask of `scaled_dot_product_attention` with one row for all queries, (…, 1, m). `scale` is
    the factor of q·k in methods that have one (None: 1/√d). `window` is the reach of local heads in tokens (None: 128).

    Raises ValueError for arguments that do not fit together."""
    check_tensors(q=q, k=k, v=v, **given(key_mask=key_mask, attn_mask=attn_mask))
    if not 2 <= q.ndim == k.ndim == v.ndim:
        raise ValueError(
            "q, k and v must have the same number of dimensions, (…, tokens, channels), but they are "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    lead = broadcast(q=q.shape[:-3], k=k.shape[:-3], v=v.shape[:-3])
    q, k, v = (x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))
    inner = _resolve(method, q, k, is_causal, window)
    if inner.causal != is_causal:
        raise ValueError(f"is_causal is {is_causal}, but {type(inner).__name__} was made with causal={inner.causal}")
    if attn_mask is not None:
        key_mask = _same_for_all_queries(attn_mask, key_mask)
    if key_mask is not None:
        for_all_heads = attn_mask is None and key_mask.ndim == 2 and k.ndim == 4
        key_mask = _four(_expanded_mask(key_mask, k, for_all_heads).unsqueeze(-1)).squeeze(-1)
    if scale is not None:
        if not inner.scales_products:
            raise ValueError(f"scale multiplies q·k, but {method!r} has other similarities: multiply q or k yourself")
        # both take a part of the factor, so that neither leaves the range of half precision
        factor = scale * q.shape[-1] ** 0.5
        q, k = q * math.copysign(abs(factor) ** 0.5, factor), k * abs(factor) ** 0.5
    return inner(_four(q), _four(k), _four(v), key_mask=key_mask).reshape(*q.shape[:-1], v.shape[-1])


def _same_for_all_queries(attn_mask: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return `attn_mask` (…, 1, m) as a key mask (…, m). Raise ValueError for another shape, or for two masks."""
    if key_mask is not None:
        raise ValueError("give key_mask or attn_mask, not both")
    if attn_mask.dtype != torch.bool or attn_mask.ndim < 2 or attn_mask.shape[-2] != 1:
        raise ValueError(
            "attn_mask must be boolean (…, 1, m), True for the keys that all queries see, but is "
            f"{attn_mask.dtype} {tuple(attn_mask.shape)}. A mask of keys (b, m) is key_mask, the causal one "
            'is_causal=True, and a window the method "local"; others, and those that add to scores, need '
            "scaled_dot_product_attention"
        )
    return attn_mask.squeeze(-2)


def _resolve(
    method: str | FeatureMap | InnerAttention, q: Tensor, k: Tensor, causal: bool, window: int | None
) -> InnerAttention:
    if window is not None and not (isinstance(method, str) and "local" in method):
        raise ValueError(f'window is that of local heads, as in "local+elu", but the method is {method!r}')
    if isinstance(method, FeatureMap):
        return LinearAttention(method, causal=causal)
    if not isinstance(method, str):
        return checked_inner(method)
    heads, key_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    sizes: dict[str, Any] = {"num_heads": heads, "num_key_heads": key_heads, "head_dim": q.shape[-1]}
    if "linformer" in method:
        # a graph for each length, which the others do not need
        sizes["max_length"] = max(k.shape[-2], 1)
    sizes |= {"causal": causal, "window": 128 if window is None else window}
    place: dict[str, Any] = {"device": q.device, "dtype": torch.promote_types(q.dtype, torch.float32)}
    # a graph cannot hold the making of a module, and an exported one would draw its features again
    traced = torch.compiler.is_compiling()
    inner = shared_attention(method, **place, **sizes) if traced else untrained_attention(method, **sizes).to(**place)
    if inner.needs is not None:
        raise ValueError(
            f"{method!r} needs gates, which a module learns to make from its input, so a function cannot hold it: "
            f"build MultiheadAttention with named_attention({method!r}, …)"
        )
    if any(True for _ in inner.parameters()):
        raise ValueError(
            f"{method!r} has weights to learn, so a function cannot hold it: build the module with "
            f"named_attention({method!r}, …), train it, and give it as method"
        )
    return inner


def _expanded_mask(key_mask: Tensor, k: Tensor, for_all_heads: bool) -> Tensor:
    """Expand a key mask to (…, h, m), the heads and keys of k. It is (b, m), `for_all_heads`, or broadcasts to k."""
    wanted = k.shape[:-1]
    shape = (key_mask.unsqueeze(-2) if for_all_heads else key_mask).shape
    if len(shape) > len(wanted) or any(b not in (a, 1) for a, b in zip(wanted[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"key_mask must be {tuple(wanted)}, as the keys, or broadcast to it, or be (b, m) for all heads, but is "
            f"{tuple(key_mask.shape)}"
        )
    return key_mask.reshape(shape).expand(wanted)


def _four(x: Tensor) -> Tensor:
    """Reshape to (b, h, n, d): add a missing batch or head, flatten several batch dimensions."""
    return align(x, 4).flatten(0, -4)
