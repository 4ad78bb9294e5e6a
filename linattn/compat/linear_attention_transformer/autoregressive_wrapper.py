"""linear-attention-transformer's way to train and to sample a causal model."""

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.compat.autoregressive import AutoregressiveBase, Filter, present_rows, top_k, top_p
from linattn.compat.linear_attention_transformer.linear_attention_transformer import LinearAttentionTransformerLM
from linattn.models.generation import Sampling, generate


@final
class AutoregressiveWrapper(AutoregressiveBase):
    """Trains and samples a causal model. In the loss, next tokens that are `ignore_index`, or masked, do not count.

    A list of sequences of different lengths is padded with `pad_value`, which has no effect on the loss."""

    def __init__(self, net: LinearAttentionTransformerLM, ignore_index: int = -100, pad_value: int = 0):
        super().__init__(net, ignore_index, pad_value)

    def forward(
        self,
        x: Int[Tensor, "b n"] | Sequence[Int[Tensor, " _"]],
        return_loss: bool = False,
        input_mask: Bool[Tensor, "b k"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Return the logits, or the mean cross entropy of all tokens but the first. A mask may leave out the last."""
        if not isinstance(x, Tensor):
            x, input_mask = self._padded(x, input_mask)
        return self._logits_or_loss(x, input_mask, context, context_mask, return_loss=return_loss)

    def _logits(self, x: Tensor, mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None) -> Tensor:
        return self.net(x, mask, context, context_mask)

    @torch.no_grad()
    def generate(
        self,
        start_tokens: Int[Tensor, "*b n"],
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Filter = top_k,
        filter_thres: float = 0.9,
        input_mask: Bool[Tensor, "b n"] | None = None,
        context: Float[Tensor, "b m d"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Int[Tensor, "*b k"]:
        """Return `seq_len` new tokens per row, fewer if all have ended; after its `eos_token` a row is `pad_value`.

        Once a row has `max_seq_len` tokens, each next one sees the last `max_seq_len`, which are read again for it. A
        temperature of 0 takes the most likely token."""
        rows = present_rows(start_tokens, input_mask)
        sampling = Sampling(temperature=temperature, filter=partial(filter_logits_fn, thres=filter_thres))
        new = self._sample(rows, seq_len, sampling, eos_token, self._begin(context, context_mask))
        longest = max(map(len, new), default=0)
        out = torch.tensor([row + [self.pad_value] * (longest - len(row)) for row in new]).to(start_tokens)
        return out.reshape(len(rows), longest) if start_tokens.ndim == 2 else out.reshape(longest)

    def _sample(
        self, rows: list[list[int]], count: int, sampling: Sampling, eos_token: int | None, state: Any
    ) -> list[list[int]]:
        """Draw all tokens at once while there are positions, then token by token."""
        longest = self.net.max_length
        ended = [False] * len(rows)
        new: list[list[int]] = [[] for _ in rows]
        while count and not all(ended):
            seen = rows if longest is None else [row[-longest:] for row in rows]
            step = count if longest is None else min(count, longest + 1 - max(map(len, seen)))
            stop = () if eos_token is None else (eos_token,)
            more = generate(self.net, seen, max_new_tokens=step, sampling=sampling, stop_tokens=stop, state=state)
            for row, (tokens, over) in enumerate(zip(more, ended, strict=True)):
                rows[row] = rows[row] + tokens
                new[row] += [] if over else tokens
                ended[row] = over or tokens[-1:] == [eos_token]
            count -= step
        return new

    def _padded(self, rows: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is not None:
            raise ValueError("a list of sequences is masked by their lengths: input_mask is for a tensor")
        lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=self.pad_value)
        return padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)


__all__ = ["AutoregressiveWrapper", "top_k", "top_p"]
