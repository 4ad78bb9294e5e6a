"""The page of documentation that shows the results of the sweep."""

import re
from collections import defaultdict
from typing import Any

import transformers

from .outcomes import EQUAL

TITLES = {
    EQUAL: "Equal in every check",
    "in part": "Equal in some checks, refused by name in others",
    "refused": "Refused by name",
    "wrong": "Silently wrong",
    "error": "Internal errors",
    "not run": "Not run",
}
INTRODUCTION = """# Stock models, class by class

`make sweep` builds a small random model of every class of transformers' auto classes, one class for each configuration,
and compares our attention with the model's own. This page shows its last run, with transformers {version}.

With `linattn:softmax`, the outputs and generated tokens must be those of the model's own attention: plain, with padding
on either side, with packed documents, and cut into pieces that a cache joins; and so must the gradient of every weight.
With `linattn:elu`, later tokens must not change earlier outputs, pieces must make the whole, padding must equal
absence, packed documents must equal separate ones, generation with a cache must equal generation without, for beams
too, a saved folder must load to the same outputs, and gradients must be finite and agree with differences of the loss.
With both, bfloat16 may change the outputs by 5 %, or by three times as much as with the model's own attention. Each
check counts only where the model's own attention passes it. At the end the model's own attention is set back, and must
give its outputs to the bit.

| outcome | classes |
|---|---|
{counts}
"""


def page(results: list[dict[str, Any]]) -> str:
    """Return the page as Markdown; `results` are the lines of the file that the sweep writes."""
    by_verdict: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in results:
        by_verdict["not run" if line["verdict"] == "not built" else line["verdict"]].append(line)
    counts = [f"| {title.lower()} | {len(by_verdict[each])} |" for each, title in TITLES.items()]
    parts = [INTRODUCTION.format(version=transformers.__version__, counts="\n".join(counts))]
    for each, title in TITLES.items():
        if each in (EQUAL, "not run") and by_verdict[each]:
            note = "" if each == EQUAL else _NOT_RUN
            parts.append(f"## {title}\n\n{note}{_names(by_verdict[each])}\n")
        elif by_verdict[each]:
            rows = [f"| {_names(lines)} | {reason} |" for reason, lines in _by_reason(by_verdict[each]).items()]
            parts.append("\n".join([f"## {title}\n", "| class | reason |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


_NOT_RUN = """These need inputs, sizes or packages that the sweep does not guess: nothing is known about them.

"""


def _names(lines: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{line['name']}`" for line in lines)


def _by_reason(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found = {check: each for check, each in line["outcomes"].items() if each != EQUAL}
        groups[_reason(line["name"], found)].append(line)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _reason(name: str, found: dict[str, str]) -> str:
    """Return the message of the first check that is not equal, without what differs from class to class."""
    check, message = next(iter(found.items()))
    kind, _, message = message.partition(": ")
    message = message.replace(name, "the small model")
    if " gives a mask of shape" in message:
        return "its attention gets a mask that differs from query to query"
    message = re.sub(r"^\w+ passes", "its attention passes", message)
    message = re.sub(r"=(tensor\([\d, ]+\)|[\d.]+)", "", message)
    message = re.sub(r", but (k is|linattn's attention knows) .*|: a model that attends .*", "", message)
    message = re.sub(r" \(as models with .*|, so linattn's .*", "", message)
    whole = kind == "refused" and EQUAL not in found.values() and check in ("set-up", "calls", "softmax")
    checks = "" if whole else f" ({', '.join(found)})"
    return message.replace("|", r"\|").replace("linattn:softmax could", "ours could") + checks
