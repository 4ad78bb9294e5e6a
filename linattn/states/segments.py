"""Training on sequences that are longer than memory: a sequence is cut into segments, of which one at a time is in
memory. Gradients are those of the whole sequence, not truncated ones.

The forward pass reads the segments without a graph and keeps the state before each. The backward pass takes them from
the last to the first: it reads a segment again from the state before it, and differentiates it. That needs the gradient
of the state after it, which comes from the next segment. So a step takes one more forward pass, and the memory of one
segment and of the states before all segments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from linattn.checks import check_sizes
from linattn.models.loss import NO_LABEL, count_following
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn.checks import check_indices, out_of_range
from linattn.nn.modes import evaluating
from linattn.ops.nested import map_state, tensors_in, with_tensors
from linattn.ops.tokens.compaction import compact, pack, packed_mask
from linattn.states.requirements import require_causal
from linattn.types import TokenIds, TokenMask

# the sum of the losses of a segment, and the state after it, from its number and the state before it
Step = Callable[[int, Any], tuple[Tensor, Any]]


def segmented_loss(
    model: TokenModel,
    tokens: TokenIds,
    state: TokenModelState | None = None,
    *,
    segment: int,
    labels: Int[Tensor, "b labels"] | None = None,
    key_mask: TokenMask = None,
) -> tuple[Float[Tensor, ""], TokenModelState]:
    """Return the mean cross entropy of each token, predicted from those before it, and the state after the last token.
    The loss, and all gradients of its `backward`, are those of the whole sequence at once, up to rounding; memory is
    that of `segment` tokens at a time.

    `tokens` are (b, n) of any length, whose past is in `state` (None: nothing was before). `labels` (b, n) replace the
    tokens as targets; a label that is `NO_LABEL`, −100, does not count. `labels` (b, n + 1) also have the target of the
    last token. A masked token (`key_mask` False) is a missing one. The gradient goes back to the parameters of `model`
    and to `state`; it cannot be differentiated again.

    Raises ValueError unless the model is causal, `segment` a positive number and `labels` of one of these shapes."""
    require_causal(model, "training in segments")
    check_sizes(segment=segment)
    check_indices(tokens, key_mask)
    labels = tokens if labels is None else labels
    following = count_following(labels, tokens)
    if key_mask is not None:
        # to the left, where the next token of each is the next in its row
        wheres = compact(key_mask), compact(F.pad(key_mask, (0, following), value=True))
        tokens, labels = (pack(x.unsqueeze(-1), y).squeeze(-1) for x, y in zip((tokens, labels), wheres, strict=True))
        key_mask = packed_mask(wheres[0])
        labels = labels.masked_fill(~packed_mask(wheres[1]), NO_LABEL)
    # models take int32 tokens too, unlike torch's loss
    targets = labels[:, 1:].long()
    targets = F.pad(targets, (0, tokens.shape[1] - targets.shape[1]), value=NO_LABEL)
    count = (targets != NO_LABEL).sum().clamp(min=1)

    def step(number: int, state: Any) -> tuple[Tensor, Any]:
        piece = slice(number * segment, (number + 1) * segment)
        mask = None if key_mask is None else key_mask[:, piece]
        x, state = model.extend_hidden(tokens[:, piece], state, key_mask=mask)
        logits = model.logits(x).flatten(0, 1)
        # half precision would lose small losses in a sum over many tokens
        logits = logits.float() if logits.element_size() < 4 else logits
        of_piece = targets[:, piece].flatten()
        try:
            loss = F.cross_entropy(logits, of_piece, ignore_index=NO_LABEL, reduction="sum")
        except IndexError as error:
            raise out_of_range("labels", of_piece[of_piece != NO_LABEL], logits.shape[-1]) from error
        return loss / count, state

    with evaluating(model):
        if state is None:
            # of no tokens, so that the first segment has a state as the others have
            state = map_state(Tensor.detach, model.extend_hidden(tokens[:, :0])[1])
        # one token shows which parts of a state have gradients
        example = model.extend_hidden(tokens[:, :1], state, key_mask=None if key_mask is None else key_mask[:, :1])[1]
        learned = [x.requires_grad for x in tensors_in(example)]
    steps = max(1, -(-tokens.shape[1] // segment))
    parameters = [x for x in model.parameters() if x.requires_grad]
    run = _Run(step, steps, state, learned)
    loss, *after = _Segments.apply(run, *tensors_in(state), *parameters)
    return loss, with_tensors(run.states.pop(), after)


class _Run:
    """The segments of one call. `states` are the states before each segment, then the state after the last one until
    the caller takes it, all without a graph. `learned` tells for each segment which tensors of the state before it have
    gradients. The backward pass restores the random generators and the autocast mode of the forward pass."""

    def __init__(self, step: Step, steps: int, first: Any, learned: list[bool]):
        self.step, self.steps, self.states = step, steps, [map_state(Tensor.detach, first)]
        self.learned = [[x.requires_grad for x in tensors_in(first)], *[learned] * (steps - 1)]
        self.device = tensors_in(first)[0].device
        kind = self.device.type
        self.autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        self.generators = list[tuple[Tensor, Any]]()

    def forward(self) -> Tensor:
        """Read all segments; return the sum of their losses."""
        total = None
        for number in range(self.steps):
            self.generators.append((torch.get_rng_state(), get_device_states(*tensors_in(self.states[-1]))))
            loss, state = self.step(number, self.states[-1])
            self.states.append(map_state(Tensor.detach, state))
            total = loss if total is None else total + loss
        assert total is not None
        return total

    @contextmanager
    def as_before(self, number: int) -> Iterator[None]:
        """Let the block read a segment again as the forward pass did, with the same random numbers and the same
        autocast mode."""
        generator, (devices, states) = self.generators[number]
        others = [] if self.device.type == "cpu" else devices
        with torch.random.fork_rng(others, device_type="cuda" if self.device.type == "cpu" else self.device.type):
            torch.set_rng_state(generator)
            set_device_states(devices, states)
            with torch.enable_grad(), torch.autocast(self.device.type, **self.autocast):
                yield


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        loss = run.forward()
        # copies: an input that comes out again would be taken for a view of itself
        after = [x.clone() for x in tensors_in(run.states[-1])]
        ctx.mark_non_differentiable(*(x for x in after if not x.is_floating_point()))
        return loss, *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # type: ignore[override]
        run: _Run = ctx.run
        dloss, *dafter = grads
        count = len(tensors_in(run.states[0]))
        parameters, totals = ctx.saved_tensors[count:], [None] * (len(ctx.saved_tensors) - count)
        dstate: Any = list(dafter)
        for number in reversed(range(run.steps)):
            learned = run.learned[number]
            parts = zip(tensors_in(run.states[number]), learned, strict=True)
            before = with_tensors(run.states[number], [x.detach().requires_grad_(y) for x, y in parts])
            leaves = [x for x in tensors_in(before) if x.requires_grad]
            with run.as_before(number):
                loss, after = run.step(number, before)
            ends = [(x, d) for x, d in zip(tensors_in(after), dstate, strict=True) if x.requires_grad and d is not None]
            outputs, upstream = [loss, *(x for x, _ in ends)], [dloss, *(d for _, d in ends)]
            grads = torch.autograd.grad(outputs, [*leaves, *parameters], upstream, allow_unused=True)
            of_leaves = iter(grads[: len(leaves)])
            dstate = [next(of_leaves) if x.requires_grad else None for x in tensors_in(before)]
            totals = [_sum(total, grad) for total, grad in zip(totals, grads[len(leaves) :], strict=True)]
        return None, *dstate, *totals


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    # not in place: gradients of several parameters may be one tensor
    return total if grad is None else grad if total is None else total + grad
