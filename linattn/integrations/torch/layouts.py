"""torch's layouts, (n, d), (b, n, d), (n, b, d) and nested tensors of sequences of different lengths, as (b, n, d)."""

import torch
from jaxtyping import Shaped
from torch import Tensor


def check_lengths(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless each sequence of a nested `key` has as many values, and all have as many sequences."""
    if query is key and key is value:
        return
    queries, keys, values = (_lengths(x).flatten().tolist() for x in (query, key, value))
    if keys != values or len(queries) != len(keys):
        raise ValueError(
            "keys and values must have the same lengths, and all as many sequences, but the queries are "
            f"{queries}, the keys {keys} and the values {values} long"
        )


def to_batches(x: Tensor, batch_first: bool) -> Tensor:
    """Return x as (b, n, d), nested tensors padded with zeros."""
    if x.is_nested:
        return x.to_padded_tensor(0.0)
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1)


def padding_of(key: Tensor, padded: Tensor, key_padding_mask: Tensor | None) -> Shaped[Tensor, "b m"] | None:
    """Return the padding mask with the batch in front. The mask of a nested `key` follows from its lengths; `padded` is
    this key padded to the longest."""
    if not key.is_nested:
        return key_padding_mask.unsqueeze(0) if key_padding_mask is not None and key.ndim == 2 else key_padding_mask
    if key_padding_mask is not None:
        raise ValueError("nested tensors have no padding, so they take no key_padding_mask")
    return _places(padded) >= _lengths(key)


def from_batches(y: Tensor, query: Tensor, batch_first: bool) -> Tensor:
    """Return y (b, n, d) in the layout of the query."""
    if query.ndim == 2:
        return y.squeeze(0)
    if not query.is_nested:
        return y if batch_first else y.transpose(0, 1)
    lengths = _lengths(query)
    if query.layout == torch.jagged:
        # these must be the offsets of the query itself, or torch would not know that the lengths are the same
        offsets = query.offsets()  # pyright: ignore[reportAttributeAccessIssue]
        return torch.nested.nested_tensor_from_jagged(y[_places(y) < lengths], offsets)
    rows = zip(y, lengths.flatten().tolist(), strict=True)
    return torch.nested.as_nested_tensor([row[:length] for row, length in rows])


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _lengths(x: Tensor) -> Tensor:
    return torch.tensor([[len(row)] for row in x.unbind()], device=x.device)
