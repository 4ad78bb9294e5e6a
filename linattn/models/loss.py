"""Next-token cross entropy."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_types
from linattn.nn.checks import check_floats, check_indices, out_of_range
from linattn.ops.tokens.compaction import compact, pack
from linattn.types import TokenIds, TokenMask

NO_LABEL = -100
"""The label of a token without a loss, as in torch and transformers."""


def count_following(labels: Tensor, tokens: Tensor) -> int:
    """Return 0 for `labels` (b, n) of `tokens` (b, n), and 1 for labels (b, n + 1), which also have the target of the
    last token. Raise ValueError for labels of another shape or kind."""
    check_indices(labels, None, name="labels")
    following = labels.shape[1] - tokens.shape[1]
    if len(labels) != len(tokens) or following not in (0, 1):
        b, n = tokens.shape[:2]
        raise ValueError(f"labels must be {(b, n)}, as the tokens, or {(b, n + 1)}, but are {tuple(labels.shape)}")
    return following


@check_types
def next_token_loss(
    logits: Float[Tensor, "b k v"], tokens: TokenIds, *, key_mask: TokenMask = None, ignore_index: int = NO_LABEL
) -> Float[Tensor, ""]:
    """Return the mean cross entropy of the next present token, over all tokens that have one; zero if none has.

    `logits` are for `tokens[:, :-1]`, as no token follows the last one, or for all tokens, where those of the last are
    ignored. Masked tokens (`key_mask` False), and next tokens that are `ignore_index`, do not count either."""
    check_indices(tokens, key_mask)
    check_floats(logits, name="logits")
    b, count = len(tokens), max(tokens.shape[1] - 1, 0)
    if logits.ndim != 3 or len(logits) != b or logits.shape[1] not in (count, count + 1):
        wanted = f"({b}, {count}, v), for all tokens but the last one, or ({b}, {count + 1}, v)"
        raise ValueError(f"logits must be {wanted}, but are {tuple(logits.shape)}")
    # models take int32 tokens too, unlike torch's loss
    tokens = tokens.long()
    logits, targets = logits[:, :count], tokens[:, 1:]
    if key_mask is not None:
        inputs, everything = compact(key_mask[:, :-1]), compact(key_mask)
        present = torch.arange(count, device=tokens.device) < everything.total.unsqueeze(1) - 1
        targets = pack(tokens.unsqueeze(-1), everything).squeeze(-1)[:, 1:]
        targets = targets.masked_fill(~present, ignore_index)
        logits = pack(logits, inputs)
    # a sum of many tokens is too large for half precision
    logits = logits.float() if logits.element_size() < 4 else logits
    counts = targets != ignore_index
    try:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum")
    except IndexError as error:
        raise out_of_range("tokens", targets[counts], logits.shape[-1]) from error
    return total / counts.sum().clamp(min=1)
