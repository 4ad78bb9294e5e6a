"""torch's masks, where True or −inf means hidden, read as what linear attention can express: missing keys and order."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# added to a score, it leaves no weight in any dtype; some models write -1e4 or -1e9 instead of −inf
_HIDDEN = -1e4


class TorchMasks(NamedTuple):
    """The masks of a call, bool or float, with batch and heads in front, and its `is_causal`."""

    key_padding: Tensor | None
    attn: Tensor | None
    causal: bool

    @classmethod
    def checked(
        cls, key_padding: Tensor | None, attn: Tensor | None, causal: bool, shape: tuple[int, int, int, int]
    ) -> "TorchMasks":
        """Check the masks of a call with `shape` (batch, heads, queries, keys) and give them leading dimensions."""
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
        return present, masks.causal
    among, causal = _keys_and_order(_visible(masks.attn, "attn_mask"))
    if among is not None:
        present = among if present is None else present & among
    return present, causal


def score_bias(masks: TorchMasks, dtype: torch.dtype) -> Float[Tensor, "#b #h #n m"] | None:
    """Return the sum of the masks as a bias of the scores, −inf where one is True."""
    parts = [None if masks.key_padding is None else masks.key_padding.unsqueeze(2), masks.attn]
    biases = [_bias(part, dtype) for part in parts if part is not None]
    return sum(biases[1:], biases[0]) if biases else None


def _visible(mask: Tensor, name: str) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask
    hidden = mask <= _HIDDEN
    plain = (hidden | (mask == 0)).all()
    message = f"{name} adds to the scores, which only softmax attention has: give a bool mask, or zeros and −inf"
    if torch.compiler.is_compiling():
        # a compiled graph can hold no other check
        torch._assert_async(plain, message)  # pyright: ignore[reportPrivateImportUsage]
    elif not plain:
        raise ValueError(message)
    return ~hidden


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


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
