"""The way from the public function to the matrix products is short: what a reader follows, counted as it runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import linattn
from linattn import causal_linear_attention

PACKAGE = str(Path(linattn.__file__).parent)
PRODUCTS = ("baddbmm_", "matmul", "bmm")


class Way(NamedTuple):
    """The package's functions down to the first product, all that were called, and their files. What a function makes
    on the way (comprehensions) belongs to it."""

    down: list[str]
    functions: set[tuple[str, str]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}


def trace(call: Callable[[], object]) -> Way:
    way = Way([], set())

    def ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(PACKAGE)

    def look(frame: FrameType, event: str, what: Any) -> None:
        code = frame.f_code
        if event == "call" and ours(frame) and not code.co_name.startswith("<"):
            way.functions.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))
        if event == "c_call" and what.__name__ in PRODUCTS and not way.down:
            above: FrameType | None = frame
            while above is not None:
                way.down.extend([above.f_code.co_name] if ours(above) else [])
                above = above.f_back

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return way


# the gradient is an operation of autograd, which takes a call more
@pytest.mark.parametrize(("gradient", "depth", "functions"), [(False, 4, 31), (True, 5, 34)])
def test_the_way_to_the_products_is_short(gradient: bool, depth: int, functions: int) -> None:
    q, k, v = (torch.randn(1, 8, 200, 64, requires_grad=gradient) for _ in range(3))
    way = trace(lambda: causal_linear_attention(q, k, v))
    assert 0 < len(way.down) <= depth, way.down
    assert len(way.functions) <= functions, sorted(way.functions)
    assert len(way.files) <= 7, sorted(way.files)
