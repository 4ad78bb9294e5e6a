"""Kernels for NVIDIA GPUs, written in Triton, which is imported with the first call that they can run.

φ, mask, decay, denominators and states stay inside: inputs are read, outputs written, and nothing between. Tensor
cores multiply bfloat16 as it is, float16 as TF32, float32 as three products of TF32, and sum in float32."""

from linattn.ops.backends.triton.bidirectional import SUMS
from linattn.ops.backends.triton.causal import BACKEND

__all__ = ["BACKEND", "SUMS"]
