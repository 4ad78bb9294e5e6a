"""torch's masks, in which True or −inf hides a key. Linear attention can express them only if they hide the same keys
from all queries, or are causal; softmax attention adds them to its scores."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.types import Keys, Outputs, Queries, Values

# added to a score, it leaves no weight in any dtype; some models write -1e4 or -1e9 instead of −inf
_HIDDEN = -1e4


class TorchMasks(NamedTuple):
    """A call's masks, bool or float, and its `is_causal`; `key_padding` is (b 1 m), `attn` (b h n m) or (1 1 n m)."""

    key_padding: Tensor | None
    attn: Tensor | None
    causal: bool

    @classmethod
    def checked(
        cls, key_padding: Tensor | None, attn: Tensor | None, causal: bool, shape: tuple[int, int, int, int]
    ) -> "TorchMasks":
        """Return the checked masks of a call with `shape` (batch, heads, queries, keys) in the shapes of this class."""
        b, h, n, m = shape
        for name, mask in (("key_padding_mask", key_padding), ("attn_mask", attn)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise ValueError(f"{name} must be bool, True where it hides, or float, but is {mask.dtype}")
        if key_padding is not None and tuple(key_padding.shape) != (b, m):
            raise ValueError(f"key_padding_mask must be {(b, m)}, as the keys, but is {tuple(key_padding.shape)}")
        if attn is not None and tuple(attn.shape) not in ((n, m), (b * h, n, m)):
            raise ValueError(f"attn_mask must be {(n, m)} or {(b * h, n, m)}, but is {tuple(attn.shape)}")
        if causal and attn is None and n != m:
            raise ValueError(f"is_causal needs a query for every key, but there are {n} and {m}")
        if attn is not None:
            attn = attn[None, None] if attn.ndim == 2 else attn.unflatten(0, (b, h))
        return cls(None if key_padding is None else key_padding[:, None], attn, causal)


def read_masks(masks: TorchMasks) -> tuple[Bool[Tensor, "b h m"] | None, bool]:
    """Return which keys are present (None: all) and whether attention is causal."""
    present = None if masks.key_padding is None else _visible(masks.key_padding, "key_padding_mask")
    if masks.attn is None or masks.causal:
        if masks.attn is not None:
            _check_causal(masks.attn)
        return present, masks.causal
    among, causal = _keys_and_order(_visible(masks.attn, "attn_mask"))
    if among is not None:
        present = among if present is None else present & among
    return present, causal


def torch_softmax(
    q: Queries, k: Keys, v: Values, masks: TorchMasks, *, causal: bool, dropout: float, need_weights: bool
) -> tuple[Outputs, Float[Tensor, "b h n m"] | None]:
    """y = drop(softmax(q kᵀ/√d + bias)) v, and the dropped weights. A query that sees no key gets zeros.

    There may be more keys than columns in the masks: all queries see the last keys, which have none. `causal` adds the
    causal order to the masks; the call's own `is_causal`, as in torch, only describes its mask."""
    n, m = q.shape[-2], k.shape[-2]
    ordered = causal or masks.causal
    columns = m if masks.attn is None else masks.attn.shape[-1]
    alone = masks.key_padding is None and (masks.attn is None or masks.causal)
    if ordered and n == m == columns and alone and not need_weights:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True), None
    bias = _score_bias(masks, q.dtype)
    if causal or (masks.causal and masks.attn is None):
        order = q.new_full((n, n), -torch.inf).triu(1)
        bias = order if bias is None else bias + order
    nothing = None
    if bias is not None:
        bias = F.pad(bias, (0, m - bias.shape[-1]))
        # a softmax over no key has NaN gradients: such a query attends to all keys and its output is discarded
        nothing = (bias == -torch.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(nothing, 0)
    if not need_weights:
        y, weights = F.scaled_dot_product_attention(q, k, v, bias, dropout), None
    else:
        # the scale first: the largest number of float16 is 65,504
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        weights = F.dropout((scores if bias is None else scores + bias).softmax(-1), dropout)
        weights = weights if nothing is None else torch.where(nothing, 0, weights)
        y = weights @ v
    return y if nothing is None else torch.where(nothing, 0, y), weights


def _visible(mask: Tensor, name: str) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask
    hidden = mask <= _HIDDEN
    plain = (hidden | (mask == 0)).all()
    _require(plain, f"{name} adds to the scores, which only softmax attention has: give a bool mask, or zeros and −inf")
    return ~hidden


def _check_causal(mask: Tensor) -> None:
    """Refuse a mask that is not the causal one, as `is_causal` says, by its last row and by the key after each query:
    to read all of it would take quadratic time."""
    last, after = (_visible(part, "attn_mask") for part in (mask[..., -1:, :], mask.diagonal(1, -2, -1)))
    _require(
        last.all() & ~after.any(),
        "is_causal=True says that attn_mask is the causal mask, but it hides other keys: hide keys by "
        "key_padding_mask, or leave is_causal out",
    )


def _require(condition: Tensor, message: str) -> None:
    if torch.compiler.is_compiling():
        # a compiled graph can hold no other check
        torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]
    elif not condition:
        raise ValueError(message)


def _keys_and_order(seen: Bool[Tensor, "b h n m"]) -> tuple[Bool[Tensor, "b h m"] | None, bool]:
    if bool(seen.all()):
        return None, False
    # the last query sees every present key, both if only keys are hidden and if the order is causal
    present = seen[..., -1, :]
    everywhere = present.unsqueeze(-2).expand_as(seen)
    if torch.equal(seen, everywhere):
        return present, False
    if seen.shape[-2] == seen.shape[-1] and torch.equal(seen, everywhere.tril()):
        return None if bool(present.all()) else present, True
    raise ValueError(
        "attn_mask must hide the same keys from all queries, or be the causal mask, or both: this attention has no "
        f"matrix of scores to mask, as softmax has, and the mask of {tuple(seen.shape)} hides others"
    )


def _score_bias(masks: TorchMasks, dtype: torch.dtype) -> Float[Tensor, "#b #h #n m"] | None:
    """Return the sum of the masks as a bias of the scores, −inf where one is True."""
    bias = None
    for mask in (None if masks.key_padding is None else masks.key_padding.unsqueeze(2), masks.attn):
        if mask is not None:
            hides = mask.dtype == torch.bool
            part = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if hides else mask.to(dtype)
            bias = part if bias is None else bias + part
    return bias
