"""The outcome of each check for one class: equal, refused by name, silently wrong, or an internal error."""

import copy
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from linattn.integrations.transformers.stock_attention.hooks import watched

from .checks import COMPARISONS, ELU, LAWS, SLOPE, SOFTMAX, applies, output
from .inputs import VARIANTS, Subject, inputs
from .small_models import make

EQUAL = "equal"
TOLERANCE = 1e-4
BFLOAT16 = 0.05
"""The relative error that bfloat16 may cause in every model."""


def outcomes(name: str, kind: str) -> dict[str, str]:
    """Return the outcome of each check that applies to this class and that its own attention passes."""
    try:
        model = make(name, kind)
    except Exception as error:
        return {"build": f"not built: {_brief(error)}"}
    subject, problem = _subject(model, kind)
    if subject is None:
        return {"build": f"not run: {problem}"}
    with torch.no_grad():
        stock = output(model, **inputs(subject))
    try:
        model.set_attn_implementation(SOFTMAX)
    except Exception as error:
        return {"set-up": _failure(error)}
    with torch.no_grad():
        found = {"calls": _calls(subject)}
        if found["calls"] == EQUAL:
            found |= {check: _comparison(subject, check) for check in COMPARISONS if applies(check, subject)}
            found |= {check: _law(subject, check) for check in LAWS if applies(check, subject)}
            found["bfloat16"] = _bfloat16(subject)
        model.set_attn_implementation(subject.stock)
        with suppress(Exception):
            found["back"] = EQUAL if torch.equal(output(model, **inputs(subject)), stock) else "wrong: another output"
    return {check: each for check, each in found.items() if each}


@torch.no_grad()
def _subject(model: Any, kind: str) -> tuple[Subject | None, str]:
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
    def run(name: str) -> list[Tensor]:
        subject.model.set_attn_implementation(name)
        found = COMPARISONS[check](subject, name)
        return found if isinstance(found, list) else [found]

    try:
        expected = run(subject.stock)
    except Exception:
        return ""
    return _outcome(lambda: list(zip(run(SOFTMAX), expected, strict=True)))


def _law(subject: Subject, check: str) -> str:
    tolerance = SLOPE if check == "slope" else TOLERANCE
    subject.model.set_attn_implementation(subject.stock)
    if _outcome(lambda: LAWS[check](subject), tolerance) != EQUAL:
        return ""
    subject.model.set_attn_implementation(ELU)
    return _outcome(lambda: LAWS[check](subject), tolerance)


def _bfloat16(subject: Subject) -> str:
    """Return "equal" if bfloat16 changes the outputs with our attention hardly more than with the model's own."""
    model = copy.deepcopy(subject.model).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        # as in a model that is loaded in bfloat16
        if "inv_freq" in name:
            buffer.data = subject.model.get_buffer(name).float()

    def error(name: str) -> float:
        outputs = []
        for each in (model, subject.model):
            each.set_attn_implementation(name)
            outputs.append(output(each, **inputs(subject._replace(model=each))).double())
        return float(((outputs[0] - outputs[1]).norm() / outputs[1].norm()).nan_to_num(torch.inf))

    try:
        limit = max(BFLOAT16, 3 * error(subject.stock))
    except Exception:
        return ""
    try:
        errors = [error(name) for name in (SOFTMAX, ELU)] if limit < 1 else []
    except Exception as failure:
        return _failure(failure)
    return next((f"wrong: {each:.2g}, beside {limit:.2g}" for each in errors if each > limit), EQUAL if errors else "")


def _outcome(run: Callable[[], list[tuple[Tensor, Tensor]]], tolerance: float = TOLERANCE) -> str:
    try:
        differences = [_difference(*pair) for pair in run()]
    except Exception as error:
        return _failure(error)
    return EQUAL if max(differences) < tolerance else f"wrong: {max(differences):.2g}"


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
