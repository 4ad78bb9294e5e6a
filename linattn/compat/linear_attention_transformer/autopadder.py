"""linear-attention-transformer's automatic padding. Our models take any length without it."""

import warnings
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from linattn.checks import check_tensors, check_types
from linattn.compat.linear_attention_transformer.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
)
from linattn.nn.checks import check_mask
from linattn.types import Context, ContextMask, TokenMask


@final
class Autopadder(nn.Module):
    """Pads sequences to a multiple of the net's `pad_to_multiple`, on the right or, if `pad_left`, on the left. The
    padding is masked, so that it does not change the outputs, and cut off again. It does not pad beyond the net's
    `max_seq_len`, for which Linformer's projections are made.

    The net takes any length by itself. Padding is useful where lengths should not vary, as for a compiled graph."""

    @check_types
    def __init__(self, net: LinearAttentionTransformer | LinearAttentionTransformerLM, pad_left: bool = False):
        if not hasattr(net, "pad_to_multiple"):
            raise ValueError(f"net must be a model of this package, but is a {type(net).__name__}")
        if pad_left and net.pad_to_multiple == 1:
            reason = "around a net without windows and blindspots, which is not padded"
            warnings.warn(f"Autopadder: pad_left=True has no effect {reason}", stacklevel=2)
        super().__init__()
        self.net, self.pad_left, self.pad_to = net, pad_left, net.pad_to_multiple

    def forward(
        self,
        x: Shaped[Tensor, "b n *d"],
        input_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> Float[Tensor, "b n o"]:
        check_tensors(x=x)
        if x.ndim not in (2, 3):
            raise ValueError(f"x must be (b, n) or (b, n, d), but is {tuple(x.shape)}")
        check_mask(x, input_mask)
        n = x.shape[1]
        missing = -n % self.pad_to
        if n <= self.net.max_seq_len:
            missing = min(missing, self.net.max_seq_len - n)
        if not missing:
            return self.net(x, input_mask, context, context_mask)
        sides = (missing, 0) if self.pad_left else (0, missing)
        present = x.new_ones(x.shape[:2], dtype=torch.bool) if input_mask is None else input_mask
        padded = F.pad(x, (0, 0) * (x.ndim - 2) + sides)
        y = self.net(padded, F.pad(present, sides), context, context_mask)
        return y[:, missing:] if self.pad_left else y[:, :n]
