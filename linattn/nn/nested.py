"""Conversion of nested tensors, which hold sequences of different lengths, to padded tensors with a mask and back."""

import torch
from jaxtyping import Bool
from torch import Tensor


def pad(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Bool[Tensor, "b m"]]:
    """Pad with zeros to (b, n, d); the mask is True for padding. Arguments that are the same object stay one object."""
    if key_padding_mask is not None:
        raise ValueError("nested tensors have no padding, so they take no key_padding_mask")
    q = query.to_padded_tensor(0.0)
    k = q if key is query else key.to_padded_tensor(0.0)
    v = k if value is key else value.to_padded_tensor(0.0)
    return q, k, v, torch.arange(k.shape[1], device=k.device) >= _lengths(key).to(k.device).unsqueeze(1)


def unpad(y: Tensor, x: Tensor) -> Tensor:
    """Return the padded y (b, n, d) as a nested tensor with the lengths and the layout of x."""
    lengths = _lengths(x).to(y.device)
    if x.layout == torch.jagged:
        # these must be the offsets of x itself, or torch would not know that the lengths are the same
        offsets = x.offsets()  # pyright: ignore[reportAttributeAccessIssue]
        real = torch.arange(y.shape[1], device=y.device) < lengths.unsqueeze(1)
        return torch.nested.nested_tensor_from_jagged(y[real], offsets)
    return torch.nested.as_nested_tensor([row[:length] for row, length in zip(y, lengths.tolist(), strict=True)])


def _lengths(x: Tensor) -> Tensor:
    return torch.tensor([len(row) for row in x.unbind()])
