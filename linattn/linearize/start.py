"""The initial values of a linearized layer's new parts: near the softmax that they replace."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from linattn.attention import GateNeeds, InnerAttention, LinearAttention, SplitHeads
from linattn.nn.gates import HeadDecay, SigmoidDecay, TokenGates

NEVER = -30.0


def with_decay(inner: InnerAttention) -> InnerAttention:
    """Return the attention with a decay per head and token in each linear part that forgets nothing yet."""
    if isinstance(inner, SplitHeads):
        parts = [with_decay(cast(InnerAttention, part)) for part in inner.parts]
        return SplitHeads(*zip(inner.heads, parts, strict=True))
    if isinstance(inner, LinearAttention) and inner.needs is None and inner.decay is None:
        inner.needs = GateNeeds(decay="head")
    return inner


@torch.no_grad()
def start_remembering(gates: nn.Module) -> None:
    """Let decays begin near 1, for every token: of the first head at 1, where it stays, to recall whatever is far; of
    the others between forgetting within 1,000 tokens and within 20. Step sizes keep the beginning of their own."""
    for module in gates.modules():
        if isinstance(module, TokenGates) and module.needs.write != "step" and module.decay is not None:
            decay = module.decay
            if isinstance(decay, SigmoidDecay):
                # −log σ(b) / 16 is near exp(−b) / 16
                heads = _slow_to_fast(len(decay.out_proj.bias) // decay.key_dim)
                decay.out_proj.bias.copy_(-(heads + math.log(16)).repeat_interleave(decay.key_dim))
            else:
                heads = _slow_to_fast(len(decay.A_log.zero_()))
                decay.dt_bias.copy_(heads.repeat_interleave(len(decay.dt_bias) // len(heads)))
            last = decay.proj if isinstance(decay, HeadDecay) else decay.out_proj
            last.weight.zero_()


def _slow_to_fast(heads: int) -> Tensor:
    """Return b per head for decays of exp(−softplus(b))."""
    b = torch.linspace(-7, -3, heads)
    # softplus is 1e-13 here, and so is its gradient
    b[0] = NEVER
    return b
