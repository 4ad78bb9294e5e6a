"""Checks the arguments of linear attention and aligns their leading dimensions, so that backends need not."""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from linattn.ops.backends import CausalCall
from linattn.ops.backends.base import accumulator
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.names import unknown_name
from linattn.ops.state import LinearState, checked_kind

NORMALIZATIONS = ("output", "keys", None)

# its exponential is zero in every dtype; in cumulative sums a larger number would erase the digits of the others
_FORGETS = -1e4


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def checked(q: Tensor, k: Tensor, v: Tensor, normalize: str | None, feature_map: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in the dtype that torch promotes them to, as an autocast region may mix dtypes."""
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"q, k and v must be (..., n, d), but are {shape(q)}, {shape(k)} and {shape(v)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same number of features, but q is {shape(q)} and k is {shape(k)}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"every key must have a value, but k is {shape(k)} and v is {shape(v)}")
    if normalize not in NORMALIZATIONS:
        raise unknown_name("normalize", normalize, NORMALIZATIONS)
    if feature_map not in ELEMENTWISE:
        raise unknown_name("feature_map", feature_map, ELEMENTWISE)
    if not q.dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating-point, but are {q.dtype}")
    return q, k, v


def checked_mask(k: Tensor, key_mask: Tensor | None) -> Tensor | None:
    if key_mask is None:
        return None
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be boolean, True where a key is present, but is {key_mask.dtype}")
    return expanded(k, key_mask, "key_mask")


def expanded(k: Tensor, x: Tensor, name: str) -> Tensor:
    """Expand (…, 1) or (…, n) to (…, n)."""
    n = k.shape[-2]
    if x.ndim == 0 or x.shape[-1] not in (1, n):
        raise ValueError(f"{name} must be (..., {n}), as k is {shape(k)}, but is {shape(x)}")
    return x.expand(*x.shape[:-1], n)


def checked_decay(log_decay: Tensor) -> Tensor:
    """Return the decays with −∞ for those of −10⁴ and less, which stand for a mask.

    Raise ValueError for positive decays where the check need not wait for a device: on a CPU, outside of compiled
    graphs and transforms. It takes 1.5 µs for one token of 8 heads (5 % of the call) and 20 µs for 16,384 (0.03 %)."""
    if not log_decay.dtype.is_floating_point:
        raise ValueError(f"log_decay must be floating-point, but is {log_decay.dtype}")
    least, largest = _bounds(log_decay)
    if largest > 0:
        raise ValueError(f"log_decay must not be positive, as the past fades or stays, but it goes up to {largest:.6g}")
    return log_decay if least > _FORGETS else log_decay.masked_fill(log_decay <= _FORGETS, -torch.inf)


def _bounds(x: Tensor) -> tuple[float, float]:
    """Return the least and the largest number in x, or −∞ and zero where reading them would wait or is impossible."""
    wrapped = torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter)
    if wrapped or x.device.type != "cpu" or is_functorch_wrapped_tensor(x) or x.numel() == 0:
        return -torch.inf, 0
    least, largest = torch.aminmax(x.detach())
    return least.item(), largest.item()


def broadcast(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    first = next(iter(shapes.values()))
    # torch.broadcast_shapes takes as long as attention for one token
    if all(s == first for s in shapes.values()):
        return tuple(first)
    try:
        return tuple(torch.broadcast_shapes(*shapes.values()))
    except RuntimeError:
        described = ", ".join(f"{name} {tuple(s)}" for name, s in shapes.items())
        raise ValueError(f"leading dimensions must broadcast, but are {described}") from None


def causal_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    normalize: str | None,
    feature_map: str,
) -> CausalCall:
    """Align a call: the state gets the leading dimensions of k and v, queries those of all; the rest broadcasts."""
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"a causal call needs a query for every key, but q is {shape(q)} and k is {shape(k)}")
    if state is not None:
        checked_kind(state, LinearState)
    n, f = k.shape[-2:]
    if log_decay is None and key_mask is None and q.shape == k.shape and k.shape[:-1] == v.shape[:-1]:
        # nothing to align in the loop of generation, where checking costs as much as computing
        lead = k.shape[:-2]
        if state is None or state.S.shape[:-2] == lead == state.z.shape[:-1]:
            S, z = _start(k, v, lead, state)
            return CausalCall(q, k, v, S, z, None, None, normalize, feature_map, state is None)
    sides = {"k": k.shape[:-2], "v": v.shape[:-2]}
    key_mask = checked_mask(k, key_mask)
    if key_mask is not None:
        sides["key_mask"] = key_mask.shape[:-1]
    if log_decay is not None:
        log_decay = expanded(k, log_decay, "log_decay")
        sides["log_decay"] = log_decay.shape[:-1]
    if state is not None:
        sides["state"] = state.S.shape[:-2]
    kv = broadcast(**sides)
    lead = broadcast(q=q.shape[:-2], keys=kv)
    kv = (1,) * (len(lead) - len(kv)) + kv
    S, z = _start(k, v, kv, state)
    if key_mask is not None:
        key_mask = align(key_mask, len(lead) + 1)
        log_decay = None if log_decay is None else torch.where(key_mask, log_decay, 0)
    if log_decay is not None:
        log_decay = align(checked_decay(log_decay), len(lead) + 1)
    q, k, v = expand(q, (*lead, n, f)), align(k, len(lead) + 2), align(v, len(lead) + 2)
    return CausalCall(q, k, v, S, z, log_decay, key_mask, normalize, feature_map, state is None)


def _start(k: Tensor, v: Tensor, lead: tuple[int, ...], state: LinearState | None) -> tuple[Tensor, Tensor]:
    f, dv, dtype = k.shape[-1], v.shape[-1], accumulator(k.dtype)
    if state is None:
        return k.new_zeros(*lead, f, dv, dtype=dtype), k.new_zeros(*lead, f, dtype=dtype)
    check_sums(state.S, state.z, f, dv, k.dtype)
    return expand(state.S, (*lead, f, dv)), expand(state.z, (*lead, f))


def check_sums(S: Tensor, z: Tensor, f: int, dv: int | None, dtype: torch.dtype) -> None:
    """Check that S is (..., f, dv) and z (..., f) in the dtype that sums inputs of `dtype`; dv None: any width."""
    if z.shape[-1:] != (f,) or S.shape[:-1] != z.shape or dv not in (None, S.shape[-1]):
        raise ValueError(
            f"the state must have S (..., {f}, {'dv' if dv is None else dv}) and z (..., {f}) for these inputs, "
            f"but has {shape(S)} and {shape(z)}"
        )
    if not S.dtype == z.dtype == accumulator(dtype):
        raise ValueError(f"the state must be {accumulator(dtype)} for these inputs, but is {S.dtype} and {z.dtype}")


def expand(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x if x.shape == shape else x.expand(shape)


def align(x: Tensor, ndim: int) -> Tensor:
    return x[(None,) * (ndim - x.ndim)] if x.ndim < ndim else x
