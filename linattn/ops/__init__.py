"""Functions of tensors: no modules, no randomness, no configuration."""

from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.linear import LinearState, causal_linear_attention

__all__ = ["ELEMENTWISE", "LinearState", "causal_linear_attention"]
