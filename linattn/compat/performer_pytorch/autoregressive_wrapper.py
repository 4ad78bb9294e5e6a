"""performer-pytorch's way to train and to sample a causal model."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from linattn.checks import check_types
from linattn.compat.autoregressive import Filter, LogitsOrLoss, LossMask, SamplingOptions, WrapperBase, top_k, top_p
from linattn.compat.performer_pytorch.performer import PerformerLM
from linattn.nn.branch import Call
from linattn.types import Context, ContextMask, TokenIds, TokenMask


@final
class AutoregressiveWrapper(WrapperBase):
    """Trains and samples a causal model. In the loss, next tokens that are `ignore_index`, or masked, do not count."""

    mask_name = "mask"

    @check_types
    def __init__(self, net: PerformerLM, ignore_index: int = 0, pad_value: int = 0):
        super().__init__(net, ignore_index, pad_value)

    def forward(
        self,
        x: TokenIds,
        mask: LossMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
        return_loss: bool = True,
    ) -> LogitsOrLoss:
        """Return the mean cross entropy of all tokens but the first or, without `return_loss`, the logits. The mask may
        lack the column of the last token."""
        return self._logits_or_loss(x, Call(mask, context, context_mask), return_loss=return_loss)

    @check_types
    def generate(
        self,
        start_tokens: Int[Tensor, "*b n"],
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Filter = top_k,
        filter_thres: float = 0.9,
        repetition_penalty: float = 1.0,
        repetition_penalty_ctx: int = 32,
        mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> Int[Tensor, "*b k"]:
        """Return `seq_len` new tokens per row, fewer if all have ended; after its `eos_token` a row is `pad_value`.

        `repetition_penalty` is for each row's last `repetition_penalty_ctx` tokens. The `filter_logits_fn`, with
        thres=`filter_thres`, keeps some logits; a temperature of 0 takes the most likely token."""
        sampling = SamplingOptions(
            temperature, filter_logits_fn, filter_thres, repetition_penalty, repetition_penalty_ctx
        )
        return self.draw_tokens(start_tokens, seq_len, eos_token, sampling, Call(mask, context, context_mask))


__all__ = ["AutoregressiveWrapper", "top_k", "top_p"]
