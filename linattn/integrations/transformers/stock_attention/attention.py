"""Our attention inside the models of transformers: what its AttentionInterface calls, for each layer."""

from collections.abc import Mapping
from functools import partial
from math import isclose, sqrt
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.attention import InnerAttention
from linattn.attention.gates import AnyGates
from linattn.attention.named import untrained_attention
from linattn.integrations.transformers.documents import DOCUMENTS, MARK
from linattn.integrations.transformers.stock_attention.cache import CachedKeys
from linattn.integrations.transformers.stock_attention.masks import attend_per_document

OWN = "linear_attention"
"""The name of a submodule that attends in place of the method, with weights of its own."""

# what models pass along beside these, and what changes nothing: positions are in q and k, packing is in the mask
NEUTRAL = {
    MARK,
    "cache_position",
    "deterministic",
    "num_items_in_batch",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
REFUSED = {
    "dropout": "there are no attention weights to drop, so train with the configuration's attention dropout at 0",
    "output_attentions": "the matrix of attention weights never exists",
    "position_bias": "a bias per pair of tokens cannot be added to features",
    "s_aux": "attention sinks belong to softmax",
    "softcap": "logits that never exist cannot be capped",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), "documents in a row are told by position_ids"),
}


def attention_forward(
    method: str,
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b hk m d"] | CachedKeys,
    value: Float[Tensor, "b hk m dv"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    gates: AnyGates = None,
    **options: Any,
) -> tuple[Float[Tensor, "b n h dv"], None]:
    """Attend by `method`, or by the module's own attention, which may need `gates`. The other arguments are those of
    transformers. There are no weights to return.

    Our methods expect q·k without the factor `scaling` = 1/√d. Any other factor is multiplied into q: some models scale
    q themselves and pass 1, which undoes it."""
    _refuse(module, attention_mask, {"dropout": dropout or None, **options})
    keys, layer = key if isinstance(key, CachedKeys) else (key, None)
    (h, n, d), (hk, m) = query.shape[1:], keys.shape[1:3]
    factor = 1.0 if scaling is None else scaling * sqrt(d)
    if not isclose(factor, 1):
        query = query * factor
    causal = is_causal_call(module, is_causal)
    inner = attention_of(module)
    if inner is None:
        method, window = windowed(method, sliding_window, m if layer is None else layer.seen)
        dtype = torch.promote_types(query.dtype, torch.float32)
        sizes = {"num_heads": h, "num_key_heads": hk, "head_dim": d, "window": window, "causal": causal}
        inner = _inner(method, query.device, dtype, **sizes)
    if attention_mask is not None and attention_mask.dtype == DOCUMENTS:
        return attend_per_document(inner, query, keys, value, attention_mask, gates).transpose(1, 2).contiguous(), None
    # with a state, the mask covers the past too
    key_mask = None if attention_mask is None else attention_mask[:, None, attention_mask.shape[1] - m :]
    if layer is not None:
        attend = partial(layer.extend, gates=gates) if causal else layer.read
        y = attend(inner, query, keys, value, key_mask)
    elif causal and n < m:
        # a cache of all keys: the queries are those of the last tokens
        query = torch.cat([query.new_zeros(*query.shape[:2], m - n, d), query], 2)
        y = inner(query, keys, value, key_mask=key_mask)[:, :, m - n :]
    else:
        y = inner(query, keys, value, key_mask=key_mask, gates=gates)
    return y.transpose(1, 2).contiguous(), None


def attention_of(module: nn.Module) -> InnerAttention | None:
    """Return the attention that a module has of its own, if it has one."""
    own: Any = module._modules.get(OWN)
    if own is None or isinstance(own, InnerAttention):
        return own
    # PEFT holds a trained copy beside the original of each of its `modules_to_save`
    return own.original_module if own.disable_adapters else own.modules_to_save[own.active_adapters[0]]


def windowed(method: str, window: int | None, tokens: int) -> tuple[str, int]:
    """Return the method in a layer that sees its last `window` tokens only, and the window of its local heads."""
    own = 128
    if window is None:
        return method, own
    if method in ("softmax", "local"):
        return "local", window if method == "softmax" else min(window, own)
    if tokens > window:
        raise ValueError(
            f"linattn:{method} cannot forget the tokens before a sliding window of {window}, but there are {tokens} "
            'tokens: "linattn:softmax" and "linattn:local" can'
        )
    return method, min(window, own)


# a dict, not functools.cache, which torch.compile does not see
_INNERS: dict[tuple[Any, ...], InnerAttention] = {}


def _inner(method: str, device: torch.device, dtype: torch.dtype, **sizes: int) -> InnerAttention:
    """Return the attention of these sizes. None depends on the layer, so layers of one kind share it."""
    kind = (method, device, dtype, *sizes.values())
    if kind not in _INNERS:
        _make(kind, sizes)
    return _INNERS[kind]


@torch.compiler.disable(recursive=True)
def _make(kind: tuple[Any, ...], sizes: dict[str, int]) -> None:
    method, device, dtype, *_ = kind
    # outside of inference mode, whose tensors cannot be used in training
    with torch.inference_mode(False):
        _INNERS[kind] = untrained_attention(method, **sizes).to(device=device, dtype=dtype)


def is_causal_call(module: nn.Module, given: bool | None) -> bool:
    """Tell whether a call is causal: its own argument decides, else the module's attribute."""
    causal = getattr(module, "is_causal", None) if given is None else given
    if isinstance(causal, bool):
        return causal
    raise ValueError(f"{type(module).__name__} does not say whether it is causal: linattn's attention needs to know")


def _refuse(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]) -> None:
    name = type(module).__name__
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.dtype not in (torch.bool, DOCUMENTS)):
        raise ValueError(
            f"{name} gives a mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype}, but linattn's "
            "attention takes (batch, tokens) and booleans, which keys are present: it cannot choose or weigh them per "
            "query, as relative positions do"
        )
    for option, value in options.items():
        if value is not None and value is not False and option not in NEUTRAL:
            reason = REFUSED.get(option, "linattn's attention does not know what it means")
            raise ValueError(f"{name} passes {option}={_brief(value)}: {reason}")


def _brief(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
