"""Checks for the arguments of inner attentions, once at the boundary, so that errors show what the caller passed."""

from typing import Any

from torch import Tensor

from linattn.checks import check_boolean, check_floating, check_tensors, given, on_one_device
from linattn.ops.nested import batch_size, first_tensor, for_batch


def check_queries(q: Tensor) -> None:
    if not isinstance(q, Tensor) or not q.dtype.is_floating_point:
        check_floating(q=q)
    if q.ndim != 4:
        raise ValueError(f"q must be (b, h, n, d), with the heads in front of the tokens, but is {tuple(q.shape)}")


def check_keys(k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    check_floating(k=k, v=v)
    shapes = f"k is {tuple(k.shape)} and v is {tuple(v.shape)}"
    if k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"k and v must be (b, h, m, d), with the heads in front of the tokens, but {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"every key must have a value, but {shapes}")
    if key_mask is None:
        return
    check_boolean(key_mask)
    check_tensors(k=k, key_mask=key_mask)
    b, hk, m, _ = k.shape
    sizes = key_mask.shape
    if len(sizes) != 3 or sizes[0] not in (1, b) or sizes[1] not in (1, hk) or sizes[2] != m:
        raise ValueError(
            f"key_mask must be {(b, hk, m)}, as the keys, or have a 1 for the batch or the heads, but is {tuple(sizes)}"
        )


def checked_heads(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Any = None, *, same_tokens: bool = False
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return q, k, v and the state, with a batch of 1 expanded to the batch size of the other tensors. Raise ValueError
    if shapes or devices do not fit together or, with `same_tokens`, if there are not as many queries as keys."""
    # each shape is read once, as checks should cost little beside a step of one token
    past = None if state is None else first_tensor(state)
    if not on_one_device(q, k, v) or (past is not None and past.device != q.device):
        check_tensors(q=q, k=k, v=v, **given(state=past))
    # outputs have the dtype of v, in which whole numbers would lose what follows the point
    if not (k.dtype.is_floating_point and v.dtype.is_floating_point):
        check_floating(k=k, v=v)
    check_queries(q)
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    past_batch = of_q[0] if state is None else None if past is None else past.shape[0]
    if past_batch == of_q[0] == of_k[0] == of_v[0]:
        if key_mask is not None or len(of_k) != 4 or len(of_v) != 4 or of_k[1:3] != of_v[1:3]:
            check_keys(k, v, key_mask)
    else:
        q, k, v, state = _same_batch(q, k, v, key_mask, state)
    if of_q[3] != of_k[3]:
        raise ValueError(f"queries and keys must have the same number of channels, but {_shapes(q, k)}")
    h, hk = of_q[1], of_k[1]
    if h != hk and (hk == 0 or h % hk):
        raise ValueError(f"the number of key heads must divide that of query heads, but {_shapes(q, k)}")
    if same_tokens and of_q[2] != of_k[2]:
        raise ValueError(
            "this attention needs as many queries as keys, as both are of the same tokens, but there are "
            f"{of_q[2]} and {of_k[2]}"
        )
    return q, k, v, state


def _same_batch(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Any
) -> tuple[Tensor, Tensor, Tensor, Any]:
    sizes = {"q": q.shape[0], "k": k.shape[0], "v": v.shape[0]}
    if state is not None:
        sizes["state"] = batch_size(state) or 0
    b = next((size for size in sizes.values() if size != 1), 1)
    if any(size not in (1, b) for size in sizes.values()):
        described = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"batch sizes must be the same, or 1, but they are {described}")
    q, k, v = (x.expand(b, *x.shape[1:]) for x in (q, k, v))
    check_keys(k, v, key_mask)
    return q, k, v, for_batch(state, b)


def _shapes(q: Tensor, k: Tensor) -> str:
    return f"q is {tuple(q.shape)} and k is {tuple(k.shape)}"
