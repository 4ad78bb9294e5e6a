"""The page of documentation that shows the results of the sweep."""

import re
from collections import defaultdict
from typing import Any

import transformers

from .outcomes import CHECKS, EQUAL

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
too, a saved folder must load to the same outputs, and the gradients must agree with differences of the loss to 1e-5,
along a random direction of all weights and along one of those of attention alone.
In bfloat16, with 64 or 70 tokens where a model reads tokens, each call of `linattn:elu` must agree with the same call
in float64 to 1 % of its largest output. The model's outputs may change by no more than 0.3 % and 1.5 times what they
change with its own attention (`linattn:softmax`), or with our attention alone computed in float64 (`linattn:elu`),
where its own changes them by no more than 10 %.
At the end the model's own attention is set back, and must give its outputs to the bit. A crash, or a check that does
not end, counts as an internal error if it happens with our attention.

A check is made only where the model's own attention passes it: the last table names the others.

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
    return "\n".join([*parts, _not_checked(results)])


_NOT_RUN = """These need inputs, sizes or packages that the sweep does not guess: nothing is known about them.

"""


def _not_checked(results: list[dict[str, Any]]) -> str:
    """Return the table of checks, with the classes whose own attention does not pass them."""
    rows = ["## Not checked\n", "| check | passed by | failed by the own attention of |", "|---|---|---|"]
    attending = [line for line in results if line["verdict"] != "refused"]
    for check in CHECKS:
        passed = sum(line["outcomes"].get(check) == EQUAL for line in attending)
        others = [line for line in attending if line["outcomes"].get(check, "").startswith("not checked")]
        rows.append(f"| {check} | {passed} | {_names(others)} |")
    return "\n".join([*rows, ""])


def _names(lines: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{line['name']}`" for line in lines)


def _by_reason(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[_reason(line["name"], line["outcomes"])].append(line)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _reason(name: str, results: dict[str, str]) -> str:
    """Return the message of the first check that fails, without what differs from class to class."""
    failures = {check: each for check, each in results.items() if not each.startswith((EQUAL, "not checked"))}
    check, message = next(iter(failures.items()))
    kind, _, message = message.partition(": ")
    message = message.replace(name, "the small model")
    if " gives a mask of shape" in message:
        return "its attention gets a mask that differs from query to query"
    message = re.sub(r"^\w+ passes", "its attention passes", message)
    message = re.sub(r"=(tensor\([\d, ]+\)|[\d.]+)", "", message)
    message = re.sub(r", but (k is|linattn's attention knows) .*|: a model that attends .*", "", message)
    message = re.sub(r" \(as models with .*|, so linattn's .*", "", message)
    of_all = kind == "refused" and check in ("set-up", "calls", "softmax")
    checks = "" if of_all else f" ({', '.join(failures)})"
    return message.replace("|", r"\|").replace("linattn:softmax could", "ours could") + checks
