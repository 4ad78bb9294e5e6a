"""A part of the sweep over the classes of transformers, one of each kind of attention; `make sweep` runs all. And the
sweep itself: its checks find attention that is wrong, and its processes that end early."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from linattn.integrations.transformers.stock_attention import hooks
from linattn.integrations.transformers.stock_attention.attention import attention_forward
from linattn.integrations.transformers.stock_attention.hooks import PREFIX, register_attention

from .sweep import __main__ as command
from .sweep.checks import ELU, SOFTMAX
from .sweep.outcomes import CHECKS, EQUAL, outcome, outcomes, reference, small_subject
from .sweep.small_models import classes, make

PART = {
    "DeepseekV3ForCausalLM": "keys and values of all heads expanded from a cached latent",
    "InformerModel": "a model of time series",
    "JetMoeForCausalLM": "keys repeated after the cache",
    "MoonshineForConditionalGeneration": "a module that computes is_causal in each call",
    "NllbMoeForConditionalGeneration": "experts that read the mask, and a decoder that is causal by its mask alone",
    "Qwen2MoeForCausalLM": "a mask for a window that no layer has",
    "Qwen3_5ForCausalLM": "attention between other layers with a state",
}
NOT_CHECKED = {
    # the state of its other layers goes through all documents
    "Qwen3_5ForCausalLM": {"documents"},
}
OF_DECODERS = {"packed", "cut", "pieces", "documents"}
OF_TOKENS = {"left", "right", "padding"}
NOT_APPLICABLE = {
    "InformerModel": OF_DECODERS | OF_TOKENS | {"generate", "cache", "future"},
    "MoonshineForConditionalGeneration": OF_DECODERS | OF_TOKENS,
    "NllbMoeForConditionalGeneration": OF_DECODERS,
}


@pytest.mark.parametrize("name", PART)
def test_a_class_passes_every_check(name):
    results = dict(outcomes(name, classes()[name]))
    applicable = {"build", "set-up", "calls", *CHECKS, "back"} - NOT_APPLICABLE.get(name, set())
    assert {check for check, each in results.items() if each == EQUAL} == applicable - NOT_CHECKED.get(name, set())
    assert results.keys() == applicable


def _scaled_gradient(x, factor):
    return factor * x + (1 - factor) * x.detach()


def _in_bfloat16(change):
    return lambda q, k, v: (q, k, change(v) if v.dtype == torch.bfloat16 else v)


WRONG = {
    "no gradient of q": lambda q, k, v: (q.detach(), k, v),
    "half the gradient of k": lambda q, k, v: (q, _scaled_gradient(k, 0.5), v),
    "no gradient of v": lambda q, k, v: (q, k, v.detach()),
    "values times 1.05": _in_bfloat16(lambda v: v * 1.05),
    "values in float8": _in_bfloat16(lambda v: v.to(torch.float8_e4m3fn).to(v.dtype)),
}
OF_GRADIENTS = (("gradients", SOFTMAX), ("slope", ELU), ("attention slope", ELU))
OF_BFLOAT16 = (("bfloat16", SOFTMAX), ("bfloat16 calls", ELU))


@cache
def _subject():
    """Return a model with attention in an encoder, in a decoder, and from one to the other."""
    name = "MoonshineForConditionalGeneration"
    return small_subject(make(name, classes()[name]), classes()[name])[0]


@contextmanager
def _changed(implementation, change):
    """Change the queries, keys and values that come into our attention."""

    def changed(method, module, q, k, v, *args, **options):
        inputs = change(q, k, v) if PREFIX + method == implementation else (q, k, v)
        return attention_forward(method, module, *inputs, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "attention_forward", changed)
        yield
    register_attention(implementation.removeprefix(PREFIX))


@pytest.mark.parametrize("wrong", WRONG)
def test_the_checks_find_wrong_attention(wrong):
    for check, implementation in OF_BFLOAT16 if wrong.startswith("values") else OF_GRADIENTS:
        own = reference(_subject(), check)
        with _changed(implementation, WRONG[wrong]):
            assert outcome(_subject(), check, own).startswith("wrong: "), (check, implementation)


def _ends(*results, end):
    def outcomes(name, kind):
        yield from results
        end()

    return outcomes


def _raise():
    raise RuntimeError("of no check")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process ended with signal 9"),
        (lambda: os._exit(3), "the process ended with status 3"),
        (lambda: time.sleep(60), "not done in 1 seconds"),
        (_raise, "RuntimeError: of no check"),
    ],
)
def test_a_class_whose_process_ends_early_is_an_error(end, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SECONDS", 1)
    monkeypatch.setattr(command, "classes", lambda: {"Model": "decoder"})
    monkeypatch.setattr(command, "outcomes", _ends(("build", EQUAL), ("softmax", EQUAL), end=end))
    monkeypatch.setattr(sys, "argv", ["sweep", "--results", str(tmp_path / "results")])
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 1
    line = json.loads((tmp_path / "results").read_text())
    assert line["verdict"] == "error"
    assert line["outcomes"] == {"build": EQUAL, "softmax": EQUAL, "process": f"error: {reason}"}


def test_a_class_whose_own_attention_ends_its_process_is_not_run(monkeypatch):
    monkeypatch.setattr(command, "outcomes", _ends(end=lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert command.results_of_process("Model", "decoder") == {"process": "not run: the process ended with signal 9"}
