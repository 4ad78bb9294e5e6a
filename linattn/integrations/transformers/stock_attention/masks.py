"""The masks of transformers' models for our attention: present keys, or documents that share a row."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from linattn.attention import InnerAttention
from linattn.attention.gates import AnyGates
from linattn.integrations.transformers.documents import CAUSAL, DOCUMENTS, document_rows
from linattn.ops.nested import map_state

MaskFunction = Callable[[Tensor, int, Tensor, Tensor], Tensor]
"""Returns True where the query sees the key; the arguments are indices of row, head, query and key, which broadcast."""

ALWAYS_MASKED: set[type[PreTrainedConfig]] = set()
"""The configurations of models without sdpa. Some of their modules are causal by the mask alone, so that their causal
masks are never left out."""


def attention_mask(
    *,
    config: PreTrainedConfig,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    mask_function: MaskFunction,
    attention_mask: Bool[Tensor, "b m"] | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    local_size: int | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Bool[Tensor, "b 1 1 m"] | Int[Tensor, "b 1 1 m"] | None:
    """Return which keys are present, or the number of each token's document, or None for neither. The dtype of causal
    masks is `CAUSAL` or `DOCUMENTS`.

    They have four dimensions because transformers leaves such masks as they are where one model passes them to another.

    transformers' AttentionMaskInterface calls this once per forward. The `mask_function` is evaluated only where it may
    differ from a causal mask: a document begins at each token that does not see the token before it."""
    if use_vmap:
        raise ValueError(
            "the model overlays a mask function of its own, but linattn's attention knows padding and packing"
        )
    present = _checked_padding(attention_mask, kv_length)
    present = None if present is None else present[:, None, None]
    if allow_is_bidirectional_skip is not None:
        return present
    if present is not None:
        present = present.to(CAUSAL)
    elif type(config) in ALWAYS_MASKED:
        present = torch.ones(batch_size, 1, 1, 0, dtype=CAUSAL, device=device)
    # a window of 0 belongs to no layer
    if allow_is_causal_skip and (not local_size or kv_length <= local_size):
        return present
    row = torch.arange(batch_size, device=device)[:, None]
    later = torch.arange(1, q_length, device=device) + q_offset
    if mask_function(row, 0, later - 1, later).any():
        raise ValueError("some tokens see later ones, as image tokens do, but linattn's attention is causal here")
    starts = torch.broadcast_to(~mask_function(row, 0, later, later - 1), (batch_size, len(later)))
    if not starts.any():
        return present
    if attention_mask is not None or q_length != kv_length:
        raise ValueError(
            "documents or chunks in a row do not go together with padding or a cache in linattn's attention"
        )
    return F.pad(starts.cumsum(-1, dtype=DOCUMENTS), (1, 0))[:, None, None]


def attend_per_document(
    inner: InnerAttention,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk n d"],
    v: Float[Tensor, "b hk n dv"],
    documents: Int[Tensor, "b n"],
    gates: AnyGates = None,
) -> Float[Tensor, "b h n dv"]:
    """Attend within each document."""
    rows = document_rows(documents)
    q, k, v, gates = map_state(lambda x: rows.split(x.transpose(1, 2)).transpose(1, 2), (q, k, v, gates))
    y = inner(q, k, v, key_mask=rows.present.unsqueeze(1), gates=gates)
    return rows.join(y.transpose(1, 2)).transpose(1, 2)


def _checked_padding(mask: Bool[Tensor, "b m"] | None, length: int) -> Bool[Tensor, "b m"] | None:
    """Return the mask of present keys, None if all are present. Raise ValueError unless it is of `length` keys."""
    if mask is None:
        return None
    if mask.shape[1] != length:
        raise ValueError(
            f"attention_mask must cover the {length} tokens up to the last one, but is {tuple(mask.shape)}"
        )
    # reading the values once costs less than masking in every layer where nothing is missing
    return None if not torch.compiler.is_compiling() and mask.all() else mask
