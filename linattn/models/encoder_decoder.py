"""An encoder of a source and a decoder that attends to its output. Vaswani et al., https://arxiv.org/abs/1706.03762"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linattn.checks import check_instances
from linattn.models.loss import NO_LABEL, next_token_loss
from linattn.models.token_model import SequenceModel, TokenModelState
from linattn.nn.modes import evaluating
from linattn.types import ContextMask, TokenIds, TokenMask

SourceIds = Int[Tensor, "b m"]


@final
class EncoderDecoder(nn.Module):
    """decoder(target, context=encoder(source)): an `encoder` without a head, which is not causal, and a causal
    `decoder` with cross attention.

    For generation each cross attention sums up the encoder's output once, and every token reads this summary: for
    linear attention (S, z), whatever the length of the source."""

    def __init__(self, encoder: SequenceModel, decoder: SequenceModel):
        super().__init__()
        check_instances(SequenceModel, encoder=encoder, decoder=decoder)
        if encoder.gives_logits or encoder.causal:
            raise ValueError("the encoder must have no head and see all tokens: its output is the decoder's context")
        if not decoder.causal:
            raise ValueError("the decoder must be causal")
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self, source: SourceIds, target: TokenIds, *, source_mask: ContextMask = None, target_mask: TokenMask = None
    ) -> Float[Tensor, "b n v"]:
        """Return the logits of the token after each one of the target."""
        context = self.encoder(source, key_mask=source_mask)
        return self.decoder(target, key_mask=target_mask, context=context, context_mask=source_mask)

    def loss(
        self,
        source: SourceIds,
        target: TokenIds,
        *,
        source_mask: ContextMask = None,
        target_mask: TokenMask = None,
        ignore_index: int = NO_LABEL,
    ) -> Float[Tensor, ""]:
        """Return the mean cross entropy of all tokens of the target but the first."""
        mask = None if target_mask is None else target_mask[:, :-1]
        logits = self(source, target[:, :-1], source_mask=source_mask, target_mask=mask)
        return next_token_loss(logits, target, key_mask=target_mask, ignore_index=ignore_index)

    @torch.no_grad()
    def begin(self, source: SourceIds, *, source_mask: ContextMask = None) -> TokenModelState:
        """Return the decoder's state before its first token, for `generate(decoder, …, state=…)` and `stream`."""
        with evaluating(self):
            return self.decoder.begin(self.encoder(source, key_mask=source_mask), context_mask=source_mask)
