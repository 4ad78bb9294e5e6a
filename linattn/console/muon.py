"""Muon: the matrices of hidden layers move along an orthogonal matrix near their momentum. Jordan et al.,
https://kellerjordan.github.io/posts/muon/

`torch.optim.Muon` multiplies in bfloat16, which takes ten times as long on CPUs without instructions for it, and leaves
all other weights to a second optimizer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW

from linattn.console.sharded_tensors import distributed_as, whole

MOMENTUM = 0.95
NEWTON_SCHULZ = 5, (3.4445, -4.7750, 2.0315)
"""The iterations, and the coefficients of x, x³ and x⁵: singular values from 0.005 to 1 end between 0.7 and 1.2."""

# the norm of a matrix that has no direction any more, as in torch's Muon
SMALLEST = 1e-7
# numbers that are multiplied together, so that a large model needs no second copy of its weights
LARGEST_STACK = 2**24


@final
class Muon(AdamW):
    """W ← W − η (λ W + 0.2 √max(rows, columns) · O) for matrices W in the `groups` that have `orthogonal=True`, with O
    near the orthogonal factor U Vᵀ of their Nesterov momentum. The factor gives a step the size of one of AdamW, whose
    learning rate η and weight decay λ thus serve both (Liu et al., https://arxiv.org/abs/2502.16982). Weights in other
    groups take AdamW's steps.

    Processes that each have a part of a matrix (DTensors) gather its momentum, and each computes the whole factor."""

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any):
        super().__init__([{"orthogonal": False, **group} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["orthogonal"]:
                self._move_matrices(group)
        super().step()
        return loss

    def _move_matrices(self, group: dict[str, Any]) -> None:
        for matrices in _stacks([matrix for matrix in group["params"] if matrix.grad is not None]):
            steps = orthogonal(torch.stack([whole(self._nesterov(matrix)) for matrix in matrices]))
            for matrix, step in zip(matrices, steps, strict=True):
                # AdamW skips weights without a gradient
                matrix.grad = None
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(distributed_as(step, matrix), alpha=-0.2 * max(matrix.shape) ** 0.5 * group["lr"])

    def _nesterov(self, matrix: Tensor) -> Tensor:
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if not state:
            # AdamW expects the number of steps in a state that it loads
            state["momentum"], state["step"] = torch.zeros_like(gradient), torch.zeros(())
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def language_model_groups(model: nn.Module, stack: nn.Module) -> list[dict[str, Any]]:
    """Return groups of a model's weights. The linear layers of its `stack` have the matrices that take orthogonal
    steps; weights that are no matrices do not decay."""
    matrices = [module.weight for module in stack.modules() if isinstance(module, nn.Linear)]
    hidden = {id(matrix) for matrix in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in hidden]
    return [
        {"params": matrices, "orthogonal": True},
        {"params": [weight for weight in others if weight.ndim > 1]},
        {"params": [weight for weight in others if weight.ndim < 2], "weight_decay": 0.0},
    ]


def orthogonal(x: Float[Tensor, "b n m"]) -> Float[Tensor, "b n m"]:
    """Return U Vᵀ of each matrix U Σ Vᵀ, but with singular values between 0.7 and 1.2 instead of 1."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    # the iterations need no precision, but CPUs often multiply bfloat16 slowly
    y = x.to(torch.bfloat16 if x.is_cuda else x.dtype)
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    iterations, (a, b, c) = NEWTON_SCHULZ
    for _ in range(iterations):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.to(x.dtype)


def _stacks(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of matrices of one shape, and of LARGEST_STACK numbers or a single matrix at most."""
    for _, alike in groupby(sorted(matrices, key=lambda x: tuple(x.shape)), key=lambda x: x.shape):
        alike = list(alike)
        count = max(1, LARGEST_STACK // alike[0].numel())
        yield from (alike[i : i + count] for i in range(0, len(alike), count))
