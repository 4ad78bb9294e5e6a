"""Cut a sequence into chunks and join them again; a running maximum. All of it exports for any length."""

import torch
from torch import Tensor
from torch.nn import functional as F

# tokens whose maxima are compared with one another at once
CHUNK = 64


def earlier(n: int, device: torch.device) -> Tensor:
    """Return a mask (n, n) that is True where column ≤ row: a token itself and those before it."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def cut(x: Tensor, length: int) -> Tensor:
    """Cut x (… n d) into chunks (… c length d), of which the last is filled up with zeros."""
    n = x.shape[-2]
    count = _count(n, length)
    return F.pad(x, (0, 0, 0, count * length - n)).unflatten(-2, (count, length))


def _count(n: int, length: int) -> int:
    """Return the number of chunks: two at least, as torch would export another graph for one."""
    if isinstance(n, torch.SymInt):
        # imported here, because it takes sympy
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        # torch knows bounds of (n + c) // length, but not of (2 n + c) // length
        if statically_known_true(n % 2 == 0):
            n, length = n // 2, length // 2
    return (n + 2 * length - 1) // length


def join(chunks: Tensor, n: int) -> Tensor:
    """Return the first n tokens of chunks (… c length d), as (… n d)."""
    # a slice would be contiguous for some lengths only, which are then another graph; and not index_select, whose
    # gradient inductor computes wrongly under vmap (torch 2.13)
    return chunks.flatten(-3, -2)[..., torch.arange(n, device=chunks.device), :]


def running_max(x: Tensor) -> Tensor:
    """max(x_1 … x_i) of x (… n): neither ONNX nor torch's core operators have a cumulative maximum."""

    def maxima(x: Tensor) -> Tensor:
        return x.unsqueeze(-2).masked_fill(~earlier(x.shape[-1], x.device), -torch.inf).amax(-1)

    inside = maxima(cut(x.unsqueeze(-1), CHUNK).squeeze(-1))
    before = F.pad(maxima(inside[..., -1]), (1, -1), value=-torch.inf)
    return join(torch.maximum(inside, before.unsqueeze(-1)).unsqueeze(-1), x.shape[-1]).squeeze(-1)
