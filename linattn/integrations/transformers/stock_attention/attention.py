"""The function that transformers' AttentionInterface calls in each layer of a model that attends by one of our
methods."""

from collections.abc import Mapping
from functools import partial
from math import isclose, sqrt
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from linattn.attention import InnerAttention
from linattn.attention.gates import AnyGates
from linattn.attention.named import shared_attention
from linattn.integrations.transformers.documents import CAUSAL, DOCUMENTS, MARK, document_numbers, present_keys
from linattn.integrations.transformers.stock_attention.cache import CachedKeys, tensor_of
from linattn.integrations.transformers.stock_attention.masks import attend_per_document

OWN = "linear_attention"
"""The name of the submodule that attends in place of the method in a layer with weights of its own for this."""

HANDOVER = "linattn_handover"
"""The attribute of a layer that attends to a part of a sequence, with the state that the process before leaves."""

MASKS = (torch.bool, CAUSAL, DOCUMENTS)
# arguments of models that change nothing here: positions are in q and k already, and packing is in the mask
NEUTRAL = {
    MARK,
    "cache_position",
    "deterministic",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    # of `stop_strings` in generate
    "tokenizer",
    "use_cache",
}
REFUSED = {
    "output_attentions": "the matrix of attention weights never exists",
    "position_bias": "a bias per pair of tokens cannot be added to features",
    "s_aux": "attention sinks belong to softmax",
    "softcap": "logits that never exist cannot be capped",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), "the documents in a row are found from position_ids"),
}


def attention_forward(
    method: str,
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b hk m d"] | CachedKeys,
    value: Float[Tensor, "b hk m dv"] | CachedKeys,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    gates: AnyGates = None,
    **options: Any,
) -> tuple[Float[Tensor, "b n h dv"], None]:
    """Attend by `method`, or by the module's own attention, which may need `gates`. Return the outputs, and None in
    place of attention weights. The other arguments are those of transformers.

    Our methods multiply q·k by 1/√d themselves, so q is multiplied by `scaling` · √d: some models scale q themselves
    and pass a scaling of 1. In training `dropout` drops keys, each for all queries of its head."""
    _refuse(module, attention_mask, options)
    layer = key.layer if isinstance(key, CachedKeys) else None
    keys, value = tensor_of(key), tensor_of(value)
    (h, n, d), (hk, m) = query.shape[1:], keys.shape[1:3]
    factor = 1.0 if scaling is None else scaling * sqrt(d)
    if not isclose(factor, 1):
        query = query * factor
    if dropout:
        # a missing value for all queries, as no single weight is ever computed; see `TorchMultiheadAttention`
        value = value * F.dropout(value.new_ones(*value.shape[:-1], 1), dropout)
    causal = is_causal_call(module, attention_mask, is_causal, n)
    inner = attention_of(module)
    if inner is None:
        method, window = sliding_method(method, sliding_window, m if layer is None else layer.seen)
        dtype = torch.promote_types(query.dtype, torch.float32)
        sizes = {"num_heads": h, "num_key_heads": hk, "head_dim": d, "window": window}
        inner = shared_attention(method, causal=causal, device=query.device, dtype=dtype, **sizes)
    documents, handover = document_numbers(attention_mask), vars(module).get(HANDOVER)
    if handover is not None and (documents is not None or layer is not None or not causal):
        raise ValueError("a model whose sequences are sharded takes one document per row, and no cache")
    if documents is not None:
        return attend_per_document(inner, query, keys, value, documents, gates).transpose(1, 2).contiguous(), None
    # with a state, the mask covers the past too
    present = present_keys(attention_mask)
    key_mask = None if present is None else present[:, None, present.shape[1] - m :]
    if layer is not None:
        attend = partial(layer.extend, gates=gates) if causal else layer.read
        y = attend(inner, query, keys, value, key_mask)
    elif causal and n < m:
        # a cache of all keys: the queries are those of the last tokens
        query = torch.cat([query.new_zeros(*query.shape[:2], m - n, d), query], 2)
        y = inner(query, keys, value, key_mask=key_mask)[:, :, m - n :]
    elif handover is not None:
        y = handover(inner, query, keys, value, key_mask)
    else:
        y = inner(query, keys, value, key_mask=key_mask, gates=gates)
    return y.transpose(1, 2).contiguous(), None


def attention_of(module: nn.Module) -> InnerAttention | None:
    """Return the module's own attention, None if it attends by the method."""
    own: Any = module._modules.get(OWN)
    if own is None or isinstance(own, InnerAttention):
        return own
    # PEFT keeps a copy that trains beside the original of each of its `modules_to_save`
    return own.original_module if own.disable_adapters else own.modules_to_save[own.active_adapters[0]]


def sliding_method(method: str, window: int | None, tokens: int) -> tuple[str, int]:
    """Return the method for a layer whose queries see the last `window` tokens only, and the window of its local
    heads."""
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


def is_causal_call(module: nn.Module, mask: Tensor | None, is_causal: bool | None, queries: int) -> bool:
    """Return whether a call is causal: by its mask, else by its argument `is_causal`, else by the module's attribute.

    Some modules pass is_causal=False for a single query, which sees all keys in either case."""
    name = type(module).__name__
    if mask is not None and mask.dtype in (CAUSAL, DOCUMENTS):
        return True
    causal = getattr(module, "is_causal", None) if is_causal is None or (not is_causal and queries == 1) else is_causal
    if not isinstance(causal, bool):
        raise ValueError(f"{name} does not say whether it is causal: linattn's attention needs to know")
    if causal and mask is not None:
        raise ValueError(f"{name} is causal, but its mask is not: linattn's attention does not know which is meant")
    return causal


def _refuse(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, Any]) -> None:
    name = type(module).__name__
    if attention_mask is not None and (attention_mask.dtype not in MASKS or attention_mask.shape[1:-1] != (1, 1)):
        raise ValueError(
            f"{name} gives a mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype}, but linattn's "
            "attention takes (batch, 1, 1, tokens) and booleans, which keys are present: it cannot choose or weigh "
            "them per query, as relative positions do"
        )
    for option, value in options.items():
        if value is not None and value is not False and option not in NEUTRAL:
            reason = REFUSED.get(option, "linattn's attention does not know what it means")
            raise ValueError(f"{name} passes {option}={_brief(value)}: {reason}")


def _brief(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
