"""Gates: numbers per token, made from the same input as q, k and v, that say how the state fades and is written."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.checks import check_tensors, on_one_device

DECAYS, WRITES = (None, "head", "channel"), (None, "strength", "step", "rate")


_NOT_TOGETHER = {("step", None), ("step", "channel"), ("rate", None), ("rate", "head")}


class GateNeeds(NamedTuple):
    """The gates that an inner attention needs per token, None for one that it does not need. `decay` is "head" or
    "channel": a decay per key head or per channel of a key. `write` is "strength", the β of the delta rule; "step", the
    Δ of a state space model, which multiplies the value and also determines the decay; or "rate", the a of RWKV-7, per
    channel of a key."""

    decay: str | None = None
    write: str | None = None


class SplitNeeds(NamedTuple):
    """The numbers of heads of the parts of a `SplitHeads`, and their needs, None for a part that needs no gates."""

    heads: tuple[int, ...]
    parts: tuple[Any, ...]


class Gates(NamedTuple):
    """`log_decay` ≤ 0 per token and key head, or per token and channel of a key; `beta`, a strength or a step, per
    token and key head, or a rate, per token and channel of a key; None for a gate that is not needed. A `SplitHeads`
    takes a tuple with the gates of each part."""

    log_decay: Float[Tensor, "b hk n"] | Float[Tensor, "b hk n d"] | None = None
    beta: Float[Tensor, "b hk n"] | Float[Tensor, "b hk n d"] | None = None


AnyNeeds = GateNeeds | SplitNeeds | None
AnyGates = Gates | tuple[Any, ...] | None


def checked_needs(needs: GateNeeds) -> GateNeeds:
    known = isinstance(needs, GateNeeds) and needs.decay in DECAYS and needs.write in WRITES and needs != GateNeeds()
    if not known or (needs.write, needs.decay) in _NOT_TOGETHER:
        raise ValueError(
            'needs must be a GateNeeds with a decay, "head" or "channel", or a write, "strength" or, if the decay is '
            f'"head", "step" or, if it is "channel", "rate", but are {needs!r}'
        )
    return needs


def needs_strength(needs: AnyNeeds, *, in_each: bool = False) -> bool:
    """Tell whether an attention writes with a strength β: a part of it or, if `in_each`, every part."""
    if isinstance(needs, SplitNeeds):
        return (all if in_each else any)(needs_strength(part, in_each=in_each) for part in needs.parts)
    return needs is not None and needs.write == "strength"


def begin_sequences(needs: AnyNeeds, gates: AnyGates, first: Bool[Tensor, "b n"]) -> Any:
    """Set the log decay to −∞ at the `first` token of each sequence. Raise ValueError if a head has no decay gate."""
    if isinstance(needs, SplitNeeds):
        parts: Any = gates
        return tuple(begin_sequences(part, own, first) for part, own in zip(needs.parts, parts, strict=True))
    if not isinstance(needs, GateNeeds) or not isinstance(gates, Gates) or gates.log_decay is None:
        raise ValueError(
            "packed sequences need an attention that fades by a gate in every head, such as gla or gated_delta"
        )
    log_decay = gates.log_decay
    first = first.unsqueeze(1) if log_decay.ndim == 3 else first[:, None, :, None]
    return gates._replace(log_decay=torch.where(first, -torch.inf, log_decay))


def checked_gates(attention: Any, gates: AnyGates, k: Tensor) -> tuple[AnyGates, ...]:
    """Return arguments to pass on, (gates,) or, if none are needed, (). Raise ValueError unless they fit the keys k."""
    needs = attention.needs
    if gates is needs is None:
        return ()
    name = type(attention).__name__
    if needs is None:
        raise ValueError(f"{name} takes no gates here, but some came")
    if gates is None:
        raise ValueError(f"{name} needs gates here, but none came: MultiheadAttention makes them from its input")
    if isinstance(needs, SplitNeeds):
        if type(gates) is not tuple or len(gates) != len(needs.parts):
            raise ValueError(
                f"{name} needs a tuple with the gates of each of {len(needs.parts)} parts, but came {gates!r}"
            )
        return (gates,)
    if not isinstance(gates, Gates):
        raise ValueError(f"{name} needs Gates, but these are a {type(gates).__name__}")
    _check_gate("log_decay", gates.log_decay, k, {None: 0, "head": 3, "channel": 4}[needs.decay])
    _check_gate("beta", gates.beta, k, {None: 0, "strength": 3, "step": 3, "rate": 4}[needs.write])
    return (gates,)


def _check_gate(name: str, gate: Tensor | None, k: Tensor, ndim: int) -> None:
    if gate is not None and not on_one_device(k, gate, gate):
        check_tensors(k=k, **{name: gate})
    came, wanted = None if gate is None else gate.shape, k.shape[:ndim] if ndim else None
    # a batch of 1 serves every row
    if came != wanted and (came is None or wanted is None or came != (1, *wanted[1:])):
        came, wanted = (None if x is None else tuple(x) for x in (came, wanted))
        raise ValueError(f"the gates' {name} must be {wanted}, as the keys are {tuple(k.shape)}, but is {came}")
