"""The matrix of similarities, for short sequences: there the number of operations is what takes time.

    A = tril(φ(q) φ(k)ᵀ)        y = (A v + φ(q) S) / (A 1 + φ(q)·z)        S ← S + φ(k)ᵀ v

Torch differentiates it, which at these lengths takes less time than a gradient of its own."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from linattn.ops.calls import SHORT, CausalCall
from linattn.ops.elementwise import ELEMENTWISE, Elementwise, elu_plus_one
from linattn.ops.numerics import accumulator, exactly, infinite_if_none, zero_masked, zero_masked_tokens
from linattn.ops.operator import Backend

# numbers of A: a megabyte in float32. Beyond, and beyond SHORT tokens, chunks took less time
LARGEST = 2**18


def unsupported(call: CausalCall) -> str | None:
    if torch.compiler.is_compiling():
        return "saves the time between operations, which a graph does not need"
    n = call.q.shape[-2]
    if n > SHORT or max(call.q.shape[:-2].numel(), call.S.shape[:-2].numel()) * n * n > LARGEST:
        return f"builds the matrix of similarities, up to {SHORT} tokens and {LARGEST:,} numbers in all"
    if call.log_decay is not None or call.normalize == "keys":
        return 'has no decay and no normalize="keys"'
    return None


def forward(call: CausalCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype, phi = accumulator(call.q.dtype), ELEMENTWISE[call.feature_map]
    q, k, v = zero_masked_tokens(call.q.to(dtype), call.k.to(dtype), call.v.to(dtype), call.key_mask)
    # fewer operations on both at once
    q, k = _map(torch.stack([q, k]), phi).unbind(0) if q.shape == k.shape else (_map(q, phi), _map(k, phi))
    k = zero_masked(k, call.key_mask)
    A = (q @ k.mT).tril()
    y, S, z = A @ v, k.mT @ v, k.sum(-2)
    if not call.zero_state:
        y, S, z = y + q @ call.S, S + call.S, z + call.z
    if call.normalize:
        d = A.sum(-1, keepdim=True)
        d = d if call.zero_state else d + q @ call.z.unsqueeze(-1)
        d = infinite_if_none(d, nonnegative=phi.nonnegative)
        # in place, torch would copy y for its gradient
        y = y / d if y.requires_grad else y.div_(d)
    return y.to(call.v.dtype), S.expand(call.S.shape).contiguous(), z.expand(call.z.shape).contiguous()


class _EluPlusOne(Function):
    """elu(x) + 1, whose derivative is computed from it: two operations instead of the five that torch would take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return elu_plus_one(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0] * ctx.saved_tensors[0].clamp(max=1)

    jvp = backward


def _map(x: Tensor, phi: Elementwise) -> Tensor:
    return _EluPlusOne.apply(x) if phi.function is elu_plus_one and x.requires_grad else phi.function(x)


BACKEND = Backend("parallel", unsupported, exactly(forward))
