"""The first values of a linearized layer's decays, which keep it near the softmax that it replaces."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from linattn.attention import GateNeeds, InnerAttention, LinearAttention, SplitHeads
from linattn.nn.gates import BoundedDecay, HeadDecay, SigmoidDecay, TokenGates

NEVER = -30.0


def with_decay(inner: InnerAttention) -> InnerAttention:
    """Return the attention with one decay per head and token in every linear part that has no decay yet."""
    if isinstance(inner, SplitHeads):
        parts = [with_decay(cast(InnerAttention, part)) for part in inner.parts]
        return SplitHeads(*zip(inner.heads, parts, strict=True))
    if isinstance(inner, LinearAttention) and inner.needs is None and inner.decay is None:
        return LinearAttention(
            inner.feature_map, causal=inner.causal, normalize=inner.normalize, needs=GateNeeds(decay="head")
        )
    return inner


@torch.no_grad()
def initialize_decays(gates: nn.Module) -> None:
    """Set the decays, equal for all tokens at first: head 0 never forgets, and the others forget over 20 to 1,000
    tokens. The step sizes of a state space model keep their own initialization."""
    for module in gates.modules():
        if isinstance(module, TokenGates) and module.needs.write != "step" and module.decay is not None:
            decay = module.decay
            if isinstance(decay, SigmoidDecay):
                # −log σ(b) / 16 is near exp(−b) / 16
                heads = _head_biases(len(decay.out_proj.bias) // decay.key_dim)
                decay.out_proj.bias.copy_(-(heads + math.log(16)).repeat_interleave(decay.key_dim))
            elif isinstance(decay, BoundedDecay):
                # e^(−1/2) σ(b) is near exp(b − 1/2)
                heads = _head_biases(len(decay.bias) // decay.key_dim) + 0.5
                decay.bias.copy_(heads.repeat_interleave(decay.key_dim))
            else:
                heads = _head_biases(len(decay.A_log.zero_()))
                decay.dt_bias.copy_(heads.repeat_interleave(len(decay.dt_bias) // len(heads)))
            last = decay.proj if isinstance(decay, HeadDecay) else decay.out_proj
            last.weight.zero_()


def _head_biases(heads: int) -> Tensor:
    """Return b per head for decays of exp(−softplus(b)), from the slowest to the fastest."""
    b = torch.linspace(-7, -3, heads)
    # softplus is 1e-13 here, and so is its gradient
    b[0] = NEVER
    return b
