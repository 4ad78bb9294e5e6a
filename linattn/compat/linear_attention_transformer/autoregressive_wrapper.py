"""linear-attention-transformer's way to train and to sample a causal model."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from linattn.checks import check_types
from linattn.compat.autoregressive import Filter, LogitsOrLoss, LossMask, SamplingOptions, WrapperBase, top_k, top_p
from linattn.compat.linear_attention_transformer.linear_attention_transformer import LinearAttentionTransformerLM
from linattn.nn.branch import Call
from linattn.types import Context, ContextMask, TokenMask


@final
class AutoregressiveWrapper(WrapperBase):
    """Trains and samples a causal model. In the loss, next tokens that are `ignore_index`, or masked, do not count.

    A list of sequences of different lengths is padded with `pad_value`, which has no effect on the loss."""

    mask_name = "input_mask"
    slides = True

    @check_types
    def __init__(self, net: LinearAttentionTransformerLM, ignore_index: int = -100, pad_value: int = 0):
        super().__init__(net, ignore_index, pad_value)

    def forward(
        self,
        x: Int[Tensor, "b n"] | Sequence[Int[Tensor, " _"]],
        return_loss: bool = False,
        input_mask: LossMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> LogitsOrLoss:
        """Return the logits or, with `return_loss`, the mean cross entropy of all tokens but the first. The mask may
        lack the column of the last token."""
        if not isinstance(x, Tensor):
            x, input_mask = self._padded(x, input_mask)
        return self._logits_or_loss(x, Call(input_mask, context, context_mask), return_loss=return_loss)

    @check_types
    def generate(
        self,
        start_tokens: Int[Tensor, "*b n"],
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Filter = top_k,
        filter_thres: float = 0.9,
        input_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> Int[Tensor, "*b k"]:
        """Return `seq_len` new tokens per row, fewer if all have ended; after its `eos_token` a row is `pad_value`.

        Once a row has `max_seq_len` tokens, the model reads the last `max_seq_len` tokens again for each new one.
        `filter_logits_fn(logits, thres=filter_thres)` keeps some logits, and a temperature of 0 takes the most likely
        token."""
        sampling = SamplingOptions(temperature, filter_logits_fn, filter_thres)
        return self.draw_tokens(start_tokens, seq_len, eos_token, sampling, Call(input_mask, context, context_mask))

    def _padded(self, rows: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is not None:
            raise ValueError("a list of sequences is masked by their lengths: input_mask is for a tensor")
        is_list = isinstance(rows, Sequence) and len(rows) > 0
        if not is_list or not all(isinstance(row, Tensor) and row.ndim == 1 for row in rows):
            raise ValueError(f"a list must have sequences, each a tensor of one dimension, but is {rows!r:.60}")
        lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=self.pad_value)
        return padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)


__all__ = ["AutoregressiveWrapper", "top_k", "top_p"]
