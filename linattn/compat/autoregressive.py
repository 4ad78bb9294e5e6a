"""The parts that both packages' AutoregressiveWrappers have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.models.generation import evaluating, nucleus
from linattn.models.loss import next_token_loss

Filter = Callable[..., Tensor]


def top_k(logits: Float[Tensor, "b v"], thres: float = 0.9) -> Float[Tensor, "b v"]:
    """Keep the most likely tokens, a share of 1 − thres of all, but at least one."""
    k = max(1, round((1 - thres) * logits.shape[-1]))
    values, indices = logits.topk(k)
    return torch.full_like(logits, -torch.inf).scatter(-1, indices, values)


def top_p(logits: Float[Tensor, "b v"], thres: float = 0.9) -> Float[Tensor, "b v"]:
    """Keep the fewest tokens that together reach the probability thres."""
    return nucleus(logits, thres)


class AutoregressiveBase(nn.Module, ABC):
    """Holds a causal model. In the loss, next tokens that are `ignore_index`, or masked, do not count."""

    def __init__(self, net: Any, ignore_index: int, pad_value: int):
        super().__init__()
        if not net.causal:
            raise ValueError("only a causal model predicts the next token: make the net with causal=True")
        self.net, self.ignore_index, self.pad_value = net, ignore_index, pad_value
        self.max_seq_len = net.max_seq_len

    @abstractmethod
    def _logits(self, x: Tensor, mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None) -> Tensor:
        """Call the net."""

    def _logits_or_loss(
        self,
        x: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b k"] | None,
        context: Float[Tensor, "b m d"] | None,
        context_mask: Bool[Tensor, "b m"] | None,
        *,
        return_loss: bool,
    ) -> Float[Tensor, "..."]:
        if mask is not None and mask.shape[1] == x.shape[1] - 1:
            mask = F.pad(mask, (0, 1), value=True)
        if not return_loss:
            return self._logits(x, mask, context, context_mask)
        logits = self._logits(x[:, :-1], None if mask is None else mask[:, :-1], context, context_mask)
        return next_token_loss(logits, x, key_mask=mask, ignore_index=self.ignore_index)

    def _begin(self, context: Tensor | None, context_mask: Tensor | None) -> Any:
        if context is None:
            return None
        with evaluating(self.net):
            return self.net.begin(context, context_mask=context_mask)


def present_rows(tokens: Int[Tensor, "*b n"], mask: Bool[Tensor, "b n"] | None) -> list[list[int]]:
    """Return the tokens that are present, row by row."""
    tokens = torch.atleast_2d(tokens)
    present = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return [row[kept].tolist() for row, kept in zip(tokens, present, strict=True)]
