"""Kernels for NVIDIA GPUs, written in Triton, which is imported with the first call that they can run.

Features and similarities stay on the processors: kernels read and write only tokens, states and some numbers per token.
Tensor cores multiply bfloat16 as it is, float16 as TF32, float32 as three products of TF32, and sum in float32."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from linattn.ops.operator import Backend
from linattn.ops.triton.support import DEVICES, experimental, read_unsupported, sums_unsupported, unsupported


@cache
def _function(module: str, function: str) -> Callable[..., Any]:
    return getattr(import_module(f"{__name__}.{module}"), function)


def _backend(reason: Callable[[Any], str | None], module: str, *functions: str) -> Backend:
    """Return a backend with `reason` as `unsupported`. The first call imports its four `functions`."""

    def later(function: str) -> Callable[..., Any]:
        return lambda *arguments: _function(module, function)(*arguments)

    forward, gradient, empty, empty_gradient = map(later, functions)
    return Backend(
        "triton", reason, forward, gradient, empty, empty_gradient, devices=DEVICES, experimental=experimental
    )


CAUSAL = _backend(unsupported, "causal_operators", "forward", "gradient", "empty", "empty_gradient")
GATED = CAUSAL._replace(unsupported=lambda _: "has no kernels for a decay per channel", gradient=None, devices=())
SUM_KEYS = _backend(
    sums_unsupported, "bidirectional_operators", "sum_keys", "sum_keys_gradient", "empty_sums", "empty_sums_gradient"
)
READ = _backend(
    read_unsupported, "bidirectional_operators", "read", "read_gradient", "empty_outputs", "empty_read_gradient"
)

__all__ = ["CAUSAL", "GATED", "READ", "SUM_KEYS"]
