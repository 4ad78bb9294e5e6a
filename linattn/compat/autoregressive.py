"""The wrapper that trains and samples a causal model, in performer-pytorch and linear-attention-transformer. The two
packages' wrappers differ in their arguments only."""

from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.checks import check_tensors, check_types
from linattn.generation.sampling import Sampling, k_largest, nucleus, penalised
from linattn.generation.streams import stream
from linattn.models.loss import next_token_loss
from linattn.nn.branch import Call
from linattn.nn.checks import check_indices, check_mask
from linattn.nn.modes import evaluating
from linattn.types import TokenIds

Filter = Callable[..., Tensor]
# it may leave out the last token, which is a target only
LossMask = Bool[Tensor, "b k"] | None
LogitsOrLoss = Float[Tensor, "..."]


@check_types
def top_k(logits: Float[Tensor, "b v"], thres: float = 0.9) -> Float[Tensor, "b v"]:
    """Keep the logits of the most likely tokens, a share of 1 − thres of all, but at least one; others become −∞."""
    _check_share(thres)
    return k_largest(logits, max(1, round((1 - thres) * logits.shape[-1])))


@check_types
def top_p(logits: Float[Tensor, "b v"], thres: float = 0.9) -> Float[Tensor, "b v"]:
    """Keep the logits of the fewest tokens that together reach the probability thres; others become −∞."""
    _check_share(thres)
    return nucleus(logits, thres)


def _check_share(thres: float) -> None:
    if not 0 <= thres <= 1:
        raise ValueError(f"thres must be in [0, 1], but is {thres}")


class SamplingOptions(NamedTuple):
    """The options for drawing a token: `filter(logits, thres=thres)` keeps some logits, as `top_k` does, and `penalty`
    lowers the logits of the last `recent` tokens of the same row (Keskar et al., https://arxiv.org/abs/1909.05858,
    section 4.1). A temperature of 0 takes the most likely token."""

    temperature: float
    filter: Filter
    thres: float
    penalty: float = 1.0
    recent: int = 32

    def sampling(self, rows: list[list[int]]) -> Sampling:
        """Return a `Sampling` for `generate`. The penalty reads the tokens so far from `rows`, to which the caller adds
        each new token."""
        if self.penalty <= 0 or self.recent < 1:
            raise ValueError(
                "repetition_penalty must be positive and repetition_penalty_ctx at least 1, "
                f"but they are {self.penalty} and {self.recent}"
            )
        keep = partial(self.filter, thres=self.thres) if self.temperature > 0 else partial(top_k, thres=1.0)
        return Sampling(temperature=self.temperature or 1.0, filter=lambda logits: keep(self._penalised(logits, rows)))

    def _penalised(self, logits: Float[Tensor, "b v"], rows: list[list[int]]) -> Float[Tensor, "b v"]:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for marks, row in zip(seen, rows, strict=True):
            marks[row[-self.recent :]] = True
        return penalised(logits, seen, self.penalty)


class WrapperBase(nn.Module, ABC):
    """Trains and samples the causal model `net`. In the loss, next tokens that are `ignore_index`, or masked, do not
    count. Generated rows that have ended go on with `pad_value`.

    `mask_name` is the net's argument for the mask. If `slides`, generation continues after the net's greatest length,
    and the net then sees as many of the last tokens as it can take."""

    mask_name: ClassVar[str]
    slides: ClassVar[bool] = False

    def __init__(self, net: Any, ignore_index: int, pad_value: int):
        super().__init__()
        # not its class, which torch.compile changes
        if not getattr(net, "gives_logits", False):
            raise ValueError(f"net must be a language model that returns logits, not this {type(net).__name__}")
        if not net.causal:
            raise ValueError("only a causal model predicts the next token: make the net with causal=True")
        self.net, self.ignore_index, self.pad_value = net, ignore_index, pad_value
        self.max_seq_len = net.max_seq_len

    def _logits_or_loss(self, x: TokenIds, call: Call, *, return_loss: bool) -> LogitsOrLoss:
        """Return the net's logits or their loss, with the masks and the context in `call`. If the mask of x lacks the
        last column, the last token is present."""
        check_indices(x, None, name="x")
        mask, seen = call.key_mask, slice(-1) if return_loss else slice(None)
        if isinstance(mask, Tensor) and mask.shape == (len(x), x.shape[1] - 1):
            mask = F.pad(mask, (0, 1), value=True)
        check_mask(x, mask)
        present = {self.mask_name: None if mask is None else mask[:, seen]}
        logits = self.net(x[:, seen], **present, context=call.context, context_mask=call.context_mask)
        return next_token_loss(logits, x, key_mask=mask, ignore_index=self.ignore_index) if return_loss else logits

    @torch.no_grad()
    def draw_tokens(
        self, start: Int[Tensor, "*b n"], count: int, eos_token: int | None, sampling: SamplingOptions, call: Call
    ) -> Int[Tensor, "*b k"]:
        """Return `count` new tokens per row, fewer if all have ended; after its `eos_token` a row is `pad_value`.
        `call` has the mask of `start` and the context."""
        check_tensors(start=start)
        tokens = start.unsqueeze(0) if start.ndim == 1 else start
        check_indices(tokens, call.key_mask, name="start")
        # the net itself refuses a context that it does not read
        call.checked(attends=True, reason="")
        present = torch.ones_like(tokens, dtype=torch.bool) if call.key_mask is None else call.key_mask
        rows: list[list[int]] = [row[kept].tolist() for row, kept in zip(tokens, present, strict=True)]
        new: list[list[int]] = [[] for _ in rows]
        ended = [False] * len(rows)
        longest = self.max_seq_len if self.slides and self.net.max_length is not None else None
        options: dict[str, Any] = {"sampling": sampling.sampling(rows)}
        options["stop_tokens"] = () if eos_token is None else (eos_token,)
        if call.context is not None:
            with evaluating(self.net):
                options["state"] = self.net.begin(call.context, context_mask=call.context_mask)
        while count and not all(ended):
            seen = rows if longest is None else [row[-longest:] for row in rows]
            steps = count if longest is None else min(count, longest + 1 - max(map(len, seen)))
            for step in stream(self.net, seen, max_new_tokens=steps, **options):
                for i, token in enumerate(step):
                    rows[i] += [] if token is None else [token]
                    new[i].append(self.pad_value if token is None or ended[i] else token)
                    ended[i] = ended[i] or token == eos_token
                if all(ended):
                    break
            count -= steps
        out = torch.tensor(new).to(start)
        return out if start.ndim == 2 else out.squeeze(0)
