"""Sizes that cannot be: every constructor answers with a ValueError that has the name and the value."""

import inspect
from collections.abc import Iterator

import numpy as np
import pytest

from linattn.compat.linear_attention_transformer import LinformerContextSettings, LinformerSettings
from tests.compat.test_every_option import CASES, TRANSFORMER, Case, built

# any token, which may be negative to be none
TOKENS = ("ignore_index", "pad_value")
MAY_BE_ZERO = ("padding", "ortho_scaling", "local_heads")


def sizes(case: Case) -> Iterator[str]:
    for name, parameter in inspect.signature(case.constructor).parameters.items():
        if parameter.annotation in (int, int | None, int | tuple[int, int]) and name not in TOKENS:
            yield name


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.constructor.__module__ + "." + case.constructor.__name__)
def test_sizes_that_cannot_be(case):
    for name in sizes(case):
        for wrong in (*(() if name in MAY_BE_ZERO else (0,)), -1, 1.5, "many", True):
            with pytest.raises(ValueError, match=f"^{name} must be .*, but is {wrong!r}$"):
                built(case, {name: wrong})
                pytest.fail(f"{name} may be {wrong!r}")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("linformer_settings", LinformerSettings(k=0)),
        ("context_linformer_settings", LinformerContextSettings(seq_len=9, k=-2)),
        ("context_linformer_settings", LinformerContextSettings(seq_len=0, k=5)),
    ],
)
def test_sizes_in_settings(name, wrong):
    (case,) = (case for case in CASES if case.constructor.__name__ == "LinearAttentionTransformer")
    with pytest.raises(ValueError, match=rf"^{name} must be a whole number of at least 1, but is Linformer.*k="):
        built(case, {"receives_context": True, name: wrong})
    assert name in TRANSFORMER


@pytest.mark.usefixtures("unchecked")
def test_whole_numbers_of_numpy_are_sizes():
    for case in CASES:
        given = {name: case.required[name] for name in sizes(case) if name in case.required}
        built(case, {name: np.int64(size) for name, size in given.items() if size is not None})
