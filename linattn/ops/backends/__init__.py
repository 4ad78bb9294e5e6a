"""The forms of the one operator. BACKENDS is in order of preference: the first that can run a call does."""

import torch
from torch import Tensor

from linattn.ops.backends import chunked, recurrent, reference, sums, triton
from linattn.ops.backends.base import Backend, BidirectionalCall, CausalCall, Sums
from linattn.ops.names import unknown_name

BACKENDS: tuple[Backend, ...] = (triton.BACKEND, recurrent.BACKEND, chunked.BACKEND, reference.BACKEND)
# attention to all keys has no form of its own for one token, and its definition does not add keys up
SUMS: tuple[Sums, ...] = (triton.SUMS, Sums("chunked", lambda *_: None, lambda *_: None, sums.sum_keys, sums.ask))


def run_causal(call: CausalCall, backend: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """By the named backend, or the first that can."""
    if backend is not None:
        _check_name(backend, [b.name for b in BACKENDS])
    reasons = []
    for candidate in BACKENDS:
        if backend in (None, candidate.name):
            reason = candidate.unsupported(call)
            if reason is None:
                return candidate.run(call)
            reasons.append(f"  {candidate.name}: {reason}")
    raise _none_can(reasons)


def run_bidirectional(call: BidirectionalCall, backend: str | None) -> Tensor:
    """Attention to all keys, likewise."""
    _check_name(backend, [*(s.name for s in SUMS), "reference"])
    if backend == "reference":
        return reference.run_bidirectional(call)
    S, z = sum_keys(call.k, call.v, call.key_mask, call.feature_map, backend)
    return ask(call.q, S, z, call.normalize, call.feature_map, call.v.dtype, backend)


def sum_keys(
    k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    reasons = []
    for candidate in SUMS:
        if backend in (None, candidate.name):
            reason = candidate.keys_unsupported(k, v)
            if reason is None:
                return candidate.sum_keys(k, v, key_mask, feature_map)
            reasons.append(f"  {candidate.name}: {reason}")
    raise _none_can(reasons)


def ask(
    q: Tensor,
    S: Tensor,
    z: Tensor,
    normalize: str | None,
    feature_map: str,
    dtype: torch.dtype,
    backend: str | None = None,
) -> Tensor:
    reasons = []
    for candidate in SUMS:
        if backend in (None, candidate.name):
            reason = candidate.ask_unsupported(q, S, z)
            if reason is None:
                return candidate.ask(q, S, z, normalize, feature_map, dtype)
            reasons.append(f"  {candidate.name}: {reason}")
    raise _none_can(reasons)


def explain_causal(call: CausalCall) -> str:
    """What `backend=None` does with the call, and what each of the others would do: a line for each backend."""
    return _explain([(b.name, b.unsupported(call)) for b in BACKENDS])


def explain_bidirectional(call: BidirectionalCall) -> str:
    found = [(s.name, s.keys_unsupported(call.k, call.v)) for s in SUMS]
    return _explain([*found, ("reference", None)])


def _explain(reasons: list[tuple[str, str | None]]) -> str:
    chosen = next(name for name, reason in reasons if reason is None)
    can = {name: "runs this call" if name == chosen else "can run it, when named" for name, _ in reasons}
    return "\n".join(f"{name}: {can[name] if reason is None else reason}" for name, reason in reasons)


def _check_name(backend: str | None, names: list[str]) -> None:
    if backend not in (None, *names):
        raise unknown_name("backend", backend, names)


def _none_can(reasons: list[str]) -> NotImplementedError:
    return NotImplementedError("\n".join(["no backend can run this call:", *reasons]))


__all__ = [
    "BACKENDS",
    "SUMS",
    "Backend",
    "BidirectionalCall",
    "CausalCall",
    "Sums",
    "ask",
    "explain_bidirectional",
    "explain_causal",
    "run_bidirectional",
    "run_causal",
    "sum_keys",
]
