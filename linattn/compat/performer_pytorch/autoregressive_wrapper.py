"""performer-pytorch's way to train and to sample a causal model."""

from functools import partial
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.compat.autoregressive import AutoregressiveBase, Filter, present_rows, top_k, top_p
from linattn.compat.performer_pytorch.language_model import PerformerLM
from linattn.models.generation import Sampling, stream


@final
class AutoregressiveWrapper(AutoregressiveBase):
    """Trains and samples a causal model. In the loss, next tokens that are `ignore_index`, or masked, do not count."""

    def __init__(self, net: PerformerLM, ignore_index: int = 0, pad_value: int = 0):
        super().__init__(net, ignore_index, pad_value)

    def forward(
        self,
        x: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b k"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
        return_loss: bool = True,
    ) -> Float[Tensor, "..."]:
        """Return the mean cross entropy of all tokens but the first, or the logits. A mask may leave out the last."""
        return self._logits_or_loss(x, mask, context, context_mask, return_loss=return_loss)

    def _logits(self, x: Tensor, mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None) -> Tensor:
        return self.net(x, mask=mask, context=context, context_mask=context_mask)

    @torch.no_grad()
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
        mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Int[Tensor, "*b k"]:
        """Return `seq_len` new tokens per row, fewer if all have ended; after its `eos_token` a row is `pad_value`.

        The penalty is for each row's last `repetition_penalty_ctx` tokens; a temperature of 0 takes the most likely."""
        rows = present_rows(start_tokens, mask)
        penalty = _Penalty([list(row) for row in rows], repetition_penalty, repetition_penalty_ctx)
        keep = partial(filter_logits_fn, thres=filter_thres) if temperature > 0 else partial(top_k, thres=1.0)
        sampling = Sampling(temperature=temperature or 1.0, filter=lambda logits: keep(penalty(logits)))
        stop = () if eos_token is None else (eos_token,)
        for step in stream(
            self.net,
            rows,
            max_new_tokens=seq_len,
            sampling=sampling,
            stop_tokens=stop,
            state=self._begin(context, context_mask),
        ):
            penalty.add([self.pad_value if token is None else token for token in step])
        out = torch.tensor([row[len(start) :] for row, start in zip(penalty.rows, rows, strict=True)])
        out = out.to(start_tokens).reshape(len(rows), -1)
        return out if start_tokens.ndim == 2 else out.squeeze(0)


class _Penalty:
    """Make each row's recent tokens less likely. Keskar et al., https://arxiv.org/abs/1909.05858, section 4.1"""

    def __init__(self, rows: list[list[int]], theta: float, context: int):
        if theta <= 0 or context < 1:
            raise ValueError(
                "repetition_penalty must be positive and repetition_penalty_ctx at least 1, "
                f"but they are {theta} and {context}"
            )
        self.rows, self.theta, self.context = rows, theta, context

    def add(self, step: list[int]) -> None:
        for row, token in zip(self.rows, step, strict=True):
            row.append(token)

    def __call__(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        if self.theta == 1:
            return logits
        recent = torch.zeros_like(logits, dtype=torch.bool)
        for marks, row in zip(recent, self.rows, strict=True):
            marks[row[-self.context :]] = True
        return torch.where(recent, torch.where(logits < 0, logits * self.theta, logits / self.theta), logits)


__all__ = ["AutoregressiveWrapper", "top_k", "top_p"]
