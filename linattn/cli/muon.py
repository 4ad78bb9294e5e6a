"""Muon: the matrices of hidden layers move along an orthogonal matrix near their momentum. Jordan et al.,
https://kellerjordan.github.io/posts/muon/

`torch.optim.Muon` multiplies in bfloat16, which takes ten times as long on CPUs without instructions for it, and leaves
all other weights to a second optimizer."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW

MOMENTUM = 0.95
NEWTON_SCHULZ = 5, (3.4445, -4.7750, 2.0315)
"""The iterations, and the coefficients of x, x³ and x⁵: singular values from 0.005 to 1 end between 0.7 and 1.2."""


@final
class Muon(AdamW):
    """W ← W − η (λ W + 0.2 √max(rows, columns) · O) for `matrices`, with O near the orthogonal factor U Vᵀ of their
    Nesterov momentum. The factor gives a step the size of one of AdamW, whose learning rate η and weight decay λ thus
    serve both (Liu et al., https://arxiv.org/abs/2502.16982). Weights in the groups of `others` take AdamW's steps."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[dict[str, Any]], **options: Any):
        super().__init__([{"params": list(matrices)}, *others], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        directions = [self._nesterov(matrix) for matrix in matrices]
        for matrix in matrices:
            # AdamW skips weights without a gradient
            matrix.grad = None
        super().step()
        for matrix, direction in zip(matrices, orthogonal(directions), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(direction, alpha=-0.2 * max(matrix.shape) ** 0.5 * group["lr"])
        return loss

    def _nesterov(self, matrix: Tensor) -> Tensor:
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if not state:
            # AdamW expects the number of steps in a state that it loads
            state["momentum"], state["step"] = torch.zeros_like(gradient), torch.zeros(())
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def muon_for(model: nn.Module, stack: nn.Module, *, weight_decay: float, **options: Any) -> Muon:
    """Return the optimizer of a model. The linear layers of its `stack` have the matrices that take orthogonal steps;
    weights that are no matrices do not decay."""
    matrices = [module.weight for module in stack.modules() if isinstance(module, nn.Linear)]
    hidden = {id(matrix) for matrix in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in hidden]
    groups = [
        {"params": [weight for weight in others if weight.ndim > 1]},
        {"params": [weight for weight in others if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return Muon(matrices, groups, weight_decay=weight_decay, **options)


def orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return U Vᵀ of each matrix U Σ Vᵀ, but with singular values between 0.7 and 1.2 instead of 1. Matrices of one
    shape are multiplied together."""
    order = sorted(range(len(matrices)), key=lambda i: tuple(matrices[i].shape))
    result = list(matrices)
    for _, places in groupby(order, key=lambda i: matrices[i].shape):
        places = list(places)
        stacked = _newton_schulz(torch.stack([matrices[i] for i in places]))
        for i, matrix in zip(places, stacked, strict=True):
            result[i] = matrix
    return result


def _newton_schulz(x: Float[Tensor, "b n m"]) -> Float[Tensor, "b n m"]:
    if x.shape[1] > x.shape[2]:
        return _newton_schulz(x.mT).mT
    # the iterations need no precision, but CPUs often multiply bfloat16 slowly
    y = x.to(torch.bfloat16 if x.is_cuda else x.dtype)
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
    iterations, (a, b, c) = NEWTON_SCHULZ
    for _ in range(iterations):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.to(x.dtype)
