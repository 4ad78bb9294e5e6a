"""The outcome of each check for one class: equal, refused by name, not checked, silently wrong or an internal error."""

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from linattn.integrations.transformers.stock_attention.hooks import watched

from .checks import COMPARISONS, ELU, LAWS, SLOPE, SOFTMAX, applies
from .inputs import VARIANTS, Subject, inputs
from .outputs import bfloat16_change, exact_attention, output
from .small_models import make

EQUAL = "equal"
CHECKS = (*COMPARISONS, *LAWS, "bfloat16")
"""The checks that are made where the model's own attention passes them."""
TOLERANCE = 1e-4
TOLERANCES = {"slope": SLOPE, "attention slope": SLOPE, "bfloat16 calls": 0.01}
LARGEST_CHANGE = 0.1
"""The change by bfloat16 beyond which it says nothing, as where rounding moves tokens to other experts."""


def outcomes(name: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the outcome of each check. The first, "build", is equal once the model has passed or failed
    every check with its own attention: whatever happens after it is due to ours."""
    try:
        model = make(name, kind)
    except Exception as error:
        yield "build", f"not built: {_brief(error)}"
        return
    subject, problem = small_subject(model, kind)
    if subject is None:
        yield "build", f"not run: {problem}"
        return
    with torch.no_grad():
        before = output(model, **inputs(subject))
    references = {check: reference(subject, check) for check in CHECKS if applies(check, subject)}
    yield "build", EQUAL
    result = _set_up(subject)
    yield "set-up", result
    if result == EQUAL:
        result = _calls(subject)
        yield "calls", result
    if result == EQUAL:
        for check, each in references.items():
            yield check, outcome(subject, check, each)
    yield "back", _back(subject, before)


def verdict(results: dict[str, str]) -> str:
    """Return the outcome of the class: the worst of its checks."""
    kinds = {check: each.partition(":")[0] for check, each in results.items()}
    for worst in ("not built", "not run", "wrong", "error"):
        if worst in kinds.values():
            return worst
    of_checks = {kinds[check] for check in CHECKS if check != "folder" and check in kinds} - {"not checked"}
    if EQUAL not in of_checks:
        return "refused"
    return EQUAL if set(kinds.values()) <= {EQUAL, "not checked"} else "in part"


@torch.no_grad()
def small_subject(model: Any, kind: str) -> tuple[Subject | None, str]:
    """Return the model with the first inputs that its own attention takes; None if there are none, and why."""
    problem = ""
    for variant in VARIANTS:
        for stock in ("sdpa", "eager") if model._supports_sdpa else ("eager",):
            subject = Subject(model, kind, stock, variant)
            try:
                model.set_attn_implementation(stock)
                if (made := inputs(subject)) and output(model, **made).isfinite().all():
                    return subject, ""
                problem = problem or "its own outputs are not finite"
            except Exception as error:
                problem = problem or _brief(error)
    return None, problem


@torch.no_grad()
def reference(subject: Subject, check: str) -> Any:
    """Return what the check compares with: a result of the model's own attention, or the reason, as a string, why the
    check says nothing about this class."""
    subject.model.set_attn_implementation(subject.stock)
    try:
        if check in COMPARISONS:
            return _tensors(subject, check)
        if check == "bfloat16":
            change = bfloat16_change(subject)
            return change if change <= LARGEST_CHANGE else f"not checked: its own outputs change by {change:.2g}"
    except Exception as error:
        return f"not checked: {_brief(error)}"
    own = _agreement(lambda: LAWS[check](subject), check)
    return own if own == EQUAL else f"not checked: with its own attention {own}"


@torch.no_grad()
def outcome(subject: Subject, check: str, reference: Any) -> str:
    """Return the outcome of a check with our attention, beside what `reference` returned."""
    if isinstance(reference, str) and reference != EQUAL:
        return reference
    if check == "bfloat16":
        return _rounding(subject, reference)
    subject.model.set_attn_implementation(ELU if check in LAWS else SOFTMAX)
    if check in LAWS:
        return _agreement(lambda: LAWS[check](subject), check)
    return _agreement(lambda: list(zip(_tensors(subject, check), reference, strict=True)), check)


def _rounding(subject: Subject, own: float) -> str:
    """Compare the changes by bfloat16 with those of the model's own attention, or of ours in float64."""
    try:
        subject.model.set_attn_implementation(SOFTMAX)
        changes = [(bfloat16_change(subject), own)]
        subject.model.set_attn_implementation(ELU)
        with exact_attention(ELU):
            exact = bfloat16_change(subject)
        changes.append((bfloat16_change(subject), exact))
    except Exception as error:
        return _failure(error)
    wrong = [f"{change:.2g}, beside {usual:.2g}" for change, usual in changes if change > 1.5 * usual + 0.003]
    return f"wrong: {'; '.join(wrong)}" if wrong else EQUAL


def _tensors(subject: Subject, check: str) -> list[Tensor]:
    result = COMPARISONS[check](subject)
    return result if isinstance(result, list) else [result]


def _set_up(subject: Subject) -> str:
    try:
        subject.model.set_attn_implementation(SOFTMAX)
    except Exception as error:
        return _failure(error)
    return EQUAL


@torch.no_grad()
def _calls(subject: Subject) -> str:
    """Return "equal" if the model calls our function at all."""
    calls: list[Any] = []
    try:
        with watched(SOFTMAX, lambda *args, **_: calls.append(args[0])):
            output(subject.model, **inputs(subject))
    except Exception as error:
        return EQUAL if calls else _failure(error)
    return EQUAL if calls else "error: the name is accepted, but no attention is replaced"


@torch.no_grad()
def _back(subject: Subject, before: Tensor) -> str:
    """Return "equal" if the model gives its outputs again, to the bit, once its own attention is set back."""
    try:
        subject.model.set_attn_implementation(subject.stock)
        after = output(subject.model, **inputs(subject))
    except Exception as error:
        # even a refusal of ours has no place here
        return f"error: {_brief(error)}"
    return EQUAL if torch.equal(after, before) else "wrong: another output"


def _agreement(run: Callable[[], list[tuple[Tensor, Tensor]]], check: str) -> str:
    try:
        difference = max((_difference(*pair) for pair in run()), default=0.0)
    except Exception as error:
        return _failure(error)
    return EQUAL if difference < TOLERANCES.get(check, TOLERANCE) else f"wrong: {difference:.2g}"


def _difference(x: Tensor, expected: Tensor) -> float:
    if x.shape != expected.shape:
        return torch.inf
    if not expected.is_floating_point():
        return float((x != expected).double().mean())
    scale = expected.abs().max().clamp(min=1e-6)
    return float(((x - expected).abs().max() / scale).nan_to_num(torch.inf))


def _failure(error: Exception) -> str:
    """Tell a refusal of ours, which is a ValueError raised in linattn, from an internal error."""
    ours = any("/linattn/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:])
    kind = "refused" if ours and isinstance(error, (ValueError, NotImplementedError)) else "error"
    return f"{kind}: {_brief(error)}"


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:200]
