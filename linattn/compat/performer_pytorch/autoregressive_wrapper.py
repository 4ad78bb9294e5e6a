"""performer-pytorch's way to train and to sample a causal model."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.compat.performer_pytorch.language_model import PerformerLM
from linattn.models.generation import Sampling, evaluating, nucleus, stream
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


@final
class AutoregressiveWrapper(nn.Module):
    """Trains and samples a causal model. In the loss, next tokens that are `ignore_index`, or masked, do not count."""

    def __init__(self, net: PerformerLM, ignore_index: int = 0, pad_value: int = 0):
        super().__init__()
        if not net.causal:
            raise ValueError("only a causal model predicts the next token: make the net with causal=True")
        self.net, self.ignore_index, self.pad_value = net, ignore_index, pad_value
        self.max_seq_len = net.max_seq_len

    def forward(
        self,
        x: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b k"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
        return_loss: bool = True,
    ) -> Float[Tensor, "..."]:
        """Return the mean cross entropy of all tokens but the first, or the logits. A mask may leave out the last one."""
        if mask is not None and mask.shape[1] == x.shape[1] - 1:
            mask = F.pad(mask, (0, 1), value=True)
        of_context = {"context": context, "context_mask": context_mask}
        if not return_loss:
            return self.net(x, mask=mask, **of_context)
        logits = self.net(x[:, :-1], mask=None if mask is None else mask[:, :-1], **of_context)
        return next_token_loss(logits, x, key_mask=mask, ignore_index=self.ignore_index)

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
        tokens = torch.atleast_2d(start_tokens)
        present = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        rows = [row[kept].tolist() for row, kept in zip(tokens, present, strict=True)]
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

    def _begin(self, context: Tensor | None, context_mask: Tensor | None) -> Any:
        if context is None:
            return None
        with evaluating(self.net):
            return self.net.begin(context, context_mask=context_mask)


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
