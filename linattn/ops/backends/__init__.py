"""The forms of the one operator. BACKENDS is in order of preference: the first that can run a call does."""

from torch import Tensor

from linattn.ops.backends import chunked, recurrent, reference, sums
from linattn.ops.backends.base import Backend, BidirectionalCall, CausalCall

BACKENDS: tuple[Backend, ...] = (recurrent.BACKEND, chunked.BACKEND, reference.BACKEND)


def run_causal(call: CausalCall, backend: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """By the named backend, or the first that can."""
    if backend is not None and backend not in {b.name for b in BACKENDS}:
        raise ValueError(f"backend must be one of {', '.join(b.name for b in BACKENDS)}, but is {backend!r}")
    reasons = []
    for candidate in BACKENDS:
        if backend in (None, candidate.name):
            reason = candidate.unsupported(call)
            if reason is None:
                return candidate.run(call)
            reasons.append(f"  {candidate.name}: {reason}")
    raise NotImplementedError("\n".join(["no backend can run this call:", *reasons]))


def run_bidirectional(call: BidirectionalCall, backend: str | None) -> Tensor:
    """Attention to all keys. It has two forms, which both run anything."""
    if backend not in (None, "chunked", "reference"):
        raise ValueError(f"backend must be chunked or reference for attention to all keys, but is {backend!r}")
    if backend == "reference":
        return reference.run_bidirectional(call)
    S, z = sums.sum_keys(call.k, call.v, call.key_mask, call.feature_map)
    return sums.ask(call.q, S, z, call.normalize, call.feature_map, call.v.dtype)


__all__ = ["BACKENDS", "Backend", "BidirectionalCall", "CausalCall", "run_bidirectional", "run_causal"]
