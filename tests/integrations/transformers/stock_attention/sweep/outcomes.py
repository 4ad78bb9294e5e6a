"""The outcome of each check for one class: equal, refused by name, silently wrong, or an internal error."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from linattn.integrations.transformers.stock_attention.hooks import watched

from .checks import COMPARISONS, ELU, LAWS, SOFTMAX, Subject, applies, inputs, output
from .small_models import make

EQUAL = "equal"
TOLERANCE = 1e-4


def outcomes(name: str, kind: str) -> dict[str, str]:
    """Return the outcome of each check that applies to this class and that its own attention passes."""
    try:
        model = make(name, kind)
    except Exception as error:
        return {"build": f"not built: {_brief(error)}"}
    subject = Subject(model, kind, "sdpa" if model._supports_sdpa else "eager")
    try:
        model.set_attn_implementation(subject.stock)
        with torch.no_grad():
            stock = output(model, **inputs(subject))
            if not stock.isfinite().all():
                return {"build": "not built: its own outputs are not finite"}
    except Exception as error:
        return {"build": f"not run: {_brief(error)}"}
    try:
        model.set_attn_implementation(SOFTMAX)
    except Exception as error:
        return {"set-up": _failure(error)}
    with torch.no_grad():
        found = {"calls": _calls(subject)}
        if found["calls"] == EQUAL:
            found |= {check: _comparison(subject, check) for check in COMPARISONS if applies(check, subject)}
            found |= {check: _law(subject, check) for check in LAWS if applies(check, subject)}
        model.set_attn_implementation(subject.stock)
        with suppress(Exception):
            found["back"] = EQUAL if torch.equal(output(model, **inputs(subject)), stock) else "wrong: another output"
    return {check: each for check, each in found.items() if each}


def verdict(found: dict[str, str]) -> str:
    """Return the outcome of the class: the worst of its checks."""
    kinds = {each.partition(":")[0] for check, each in found.items() if check not in ("calls", "back", "folder")}
    kinds = kinds or {each.partition(":")[0] for each in found.values()}
    for worst in ("not built", "not run", "wrong", "error"):
        if worst in {each.partition(":")[0] for each in found.values()}:
            return worst
    if found.get("calls", "").startswith("refused"):
        return "refused"
    if kinds == {EQUAL}:
        return EQUAL
    return "in part" if EQUAL in kinds else "refused"


def _calls(subject: Subject) -> str:
    """Return "equal" if the model calls our function at all."""
    calls: list[Any] = []
    try:
        with watched(SOFTMAX, lambda *args, **_: calls.append(args[0])):
            output(subject.model, **inputs(subject))
    except Exception as error:
        return EQUAL if calls else _failure(error)
    return EQUAL if calls else "error: the name is accepted, but no attention is replaced"


def _comparison(subject: Subject, check: str) -> str:
    run = COMPARISONS[check]
    subject.model.set_attn_implementation(subject.stock)
    try:
        expected = run(subject, subject.stock)
    except Exception:
        return ""
    subject.model.set_attn_implementation(SOFTMAX)
    return _outcome(lambda: [(run(subject, SOFTMAX), expected)])


def _law(subject: Subject, check: str) -> str:
    subject.model.set_attn_implementation(subject.stock)
    if _outcome(lambda: LAWS[check](subject)) != EQUAL:
        return ""
    subject.model.set_attn_implementation(ELU)
    return _outcome(lambda: LAWS[check](subject))


def _outcome(run: Callable[[], list[tuple[Tensor, Tensor]]]) -> str:
    try:
        differences = [_difference(*pair) for pair in run()]
    except Exception as error:
        return _failure(error)
    return EQUAL if max(differences) < TOLERANCE else f"wrong: {max(differences):.2g}"


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return torch.inf
    if not expected.is_floating_point():
        return float((found != expected).double().mean())
    scale = expected.abs().max().clamp(min=1e-6)
    difference = float(((found - expected).abs().max() / scale).nan_to_num(torch.inf))
    return difference


def _failure(error: Exception) -> str:
    """Tell a refusal of ours, which is a ValueError raised in linattn, from an internal error."""
    ours = any("/linattn/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:])
    kind = "refused" if ours and isinstance(error, (ValueError, NotImplementedError)) else "error"
    return f"{kind}: {_brief(error)}"


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:200]
