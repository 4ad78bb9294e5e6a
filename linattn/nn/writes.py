"""Several writes per token, one operator: a token of w writes is w tokens of the delta rule, each with a key, value and
strength of its own. The state fades before the first, and the query reads after the last.

Siems et al., DeltaProduct, https://arxiv.org/abs/2502.10297: with w reflections per token a state can be rotated."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from linattn.attention.gates import AnyGates, Gates


def fade_at_first(gates: AnyGates, writes: int) -> AnyGates:
    """Return gates for n · `writes` tokens: the decay of each of n tokens is at its first write, and the others have
    none. Strengths stay as they are, one per write."""
    if isinstance(gates, Gates) and gates.log_decay is not None:
        return gates._replace(log_decay=_apart(gates.log_decay, (0, writes - 1)))
    if isinstance(gates, tuple) and not isinstance(gates, Gates):
        return tuple(fade_at_first(part, writes) for part in gates)
    return gates


def read_at_last(q: Tensor, writes: int) -> Tensor:
    """Return the queries (b h n·writes d) for q (b h n d): zeros but for the last write of each token."""
    return _apart(q, (writes - 1, 0))


def at_last(x: Any, writes: int) -> Any:
    """Return what x (b h n·writes d) has at the last write of each token, (b h n d)."""
    return x[:, :, writes - 1 :: writes]


def for_each(x: Tensor, writes: int, dim: int) -> Tensor:
    """Repeat each token along `dim` for each of its writes."""
    return x if writes == 1 else x.repeat_interleave(writes, dim)


def _apart(x: Tensor, zeros: tuple[int, int]) -> Tensor:
    """Put `zeros` before and after each token of x (b h n …)."""
    return F.pad(x.unsqueeze(3), (0, 0) * (x.ndim - 3) + zeros).flatten(2, 3)
