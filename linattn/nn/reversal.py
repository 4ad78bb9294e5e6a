"""Backpropagation without stored activations: the inputs of each step are computed from its outputs.
Gomez et al., RevNet, https://arxiv.org/abs/1707.04585, algorithm 1"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from linattn.nn.branch import Call
from linattn.nn.modes import mode_switch, modes_of
from linattn.types import Tokens


def run_reversibly(branches: Sequence[nn.Module], x: Tokens, call: Call) -> tuple[Tokens, Tokens]:
    """Compute (a, b) ← (b, a + branch(b)) for each branch in turn, from a = b = x.

    Weights and context are inputs of the one autograd function. So they get gradients even if x needs none, their
    gradients reach `torch.autograd.grad` and DDP's hooks, and the context's own graph is differentiated once."""
    if not branches:
        return x, x
    weights = tuple(dict.fromkeys(weight for branch in branches for weight in _weights(branch)))
    return _Reversal.apply(branches, call.key_mask, call.context_mask, x, call.context, *weights)


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branches: Sequence[nn.Module],
        key_mask: Tensor | None,
        context_mask: Tensor | None,
        x: Tensor,
        context: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        places = {weight: place for place, weight in enumerate(weights, start=1)}
        ctx.branches = [(branch, [places[weight] for weight in _weights(branch)]) for branch in branches]
        ctx.autocast, ctx.randomness, ctx.modes = _autocast_regions(x), [], modes_of(*branches)
        call, first, second = Call(key_mask, context, context_mask), x, x
        for branch in branches:
            ctx.randomness.append(_randomness(x))
            with _autocast(ctx.autocast):
                first, second = second, first + call(branch, second)
        # with buffers among them autograd notices if random features are resampled before the backward pass
        buffers = [buffer for branch in branches for buffer in branch.buffers()]
        ctx.save_for_backward(first, second, *call, *weights, *buffers)
        # saved tensors may come back as other objects, so their identity is kept here
        ctx.tensors = [(tensor, tensor.requires_grad) for tensor in _tensors(branches)]
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        first, second, key_mask, context, context_mask, *_ = ctx.saved_tensors
        now = [(id(tensor), tensor.requires_grad) for tensor in _tensors([branch for branch, _ in ctx.branches])]
        if now != [(id(tensor), needs_gradient) for tensor, needs_gradient in ctx.tensors]:
            raise RuntimeError(
                "the branches of a reversible stack must have the same weights and buffers in the backward pass as in "
                "the forward pass, and the same of them frozen, but some are other tensors now, as after "
                "torch.func.functional_call, or requires_grad has changed: copy the weights into the module, freeze "
                "before the forward pass, or use a ResidualSequence"
            )
        shared = [] if context is None or not ctx.needs_input_grad[4] else [context.detach().requires_grad_()]
        call = Call(key_mask, shared[0] if shared else context, context_mask)
        d_first, d_second = grads
        # the context's gradient, then the weights'
        totals: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 4)
        for (branch, places), same_randomness in zip(reversed(ctx.branches), reversed(ctx.randomness), strict=True):
            first = first.detach().requires_grad_()
            inputs = [first, *shared, *_weights(branch)]
            with mode_switch(ctx.modes):
                with torch.enable_grad(), _autocast(ctx.autocast), same_randomness():
                    delta = call(branch, first)
                # a branch with checkpoints runs once more here
                d_input, *d_inputs = torch.autograd.grad(delta, inputs, d_second.to(delta.dtype), allow_unused=True)
            first, second = second - delta.detach(), first
            d_first, d_second = d_second, d_first if d_input is None else d_first + d_input
            for place, gradient in zip([0] * len(shared) + places, d_inputs, strict=True):
                if gradient is not None:
                    total = totals[place]
                    totals[place] = gradient if total is None else total + gradient
        return None, None, None, d_first + d_second, *totals


def _weights(branch: nn.Module) -> list[Tensor]:
    return [weight for weight in branch.parameters() if weight.requires_grad]


def _tensors(branches: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for branch in branches for tensor in (*branch.parameters(), *branch.buffers())]


def _autocast_regions(x: Tensor) -> list[tuple[str, torch.dtype]]:
    """Return the type and the autocast dtype of each device, of the CPU and x's, for which autocast is on now."""
    devices = [device for device in {"cpu", x.device.type} if torch.amp.is_autocast_available(device)]
    return [(device, torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)]


@contextmanager
def _autocast(regions: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Turn autocast on for these devices and dtypes, without its cache of weights, which was filled under no_grad."""
    with ExitStack() as stack:
        for device, dtype in regions:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield


def _randomness(x: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts in which the random generators of the CPU and of x's device are as they are
    now, so that a branch's dropout can be repeated."""
    cpu, (devices, states) = torch.get_rng_state(), get_device_states(x)
    kind = x.device.type if devices else "cpu"

    @contextmanager
    def restored() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(cpu)
            set_device_states(devices, states, device_type=kind)
            yield

    return restored
