"""Causal attention with a state, each form as short as it can be written. The page *How it works* shows this file, and
tests compare every form with the library's operators.

q and k are features (…, n, d), v values (…, n, dv), g log decays and beta write strengths (…, n, 1). The state S is
(…, d, dv)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# outputs and the state after them
State = tuple[Tensor, Tensor]
Step = Callable[..., State]


# [definition]
def decay_matrix(g: Tensor) -> Tensor:
    """D_ij = exp(g_{j+1} + … + g_i) for j ≤ i, else 0: what is left at token i of what token j wrote."""
    total = g.cumsum(-2)
    return (total - total.mT).tril().exp().tril()


def definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return (q @ k.mT * decay_matrix(g)) @ v


# [recurrent]
def token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> State:
    S = g.exp() * S + k.mT @ v
    return q @ S, S


# [chunked]
def chunk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> State:
    total = g.cumsum(-2)
    last = total[..., -1:, :]
    y = definition(q, k, v, g) + (q * total.exp()) @ S
    return y, last.exp() * S + (k * (last - total).exp()).mT @ v


# [delta]
def delta_token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> State:
    S = g.exp() * S
    error = v - k @ S
    S = S + k.mT @ (beta * error)
    return q @ S, S


# [delta chunked]
def delta_chunk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> State:
    total, D = g.cumsum(-2), decay_matrix(g)
    last = total[..., -1:, :]
    # the error of each token if no other token of the chunk wrote anything
    error = v - (k * total.exp()) @ S
    # with (L w)_i = β_i Σ_{j<i} D_ij (k_i·k_j) w_j, what token i recalls of earlier writes: w = β error − L w
    L = beta * (k @ k.mT * D).tril(-1)
    one = torch.eye(L.shape[-1], dtype=L.dtype)
    write = torch.linalg.solve_triangular(one + L, beta * error, upper=False, unitriangular=True)
    y = (q * total.exp()) @ S + (q @ k.mT * D) @ write
    return y, last.exp() * S + (k * (last - total).exp()).mT @ write


# [walk]
def walk(step: Step, length: int, S: Tensor, *tokens: Tensor) -> State:
    """Take a sequence in pieces of `length` tokens: 1 for the recurrent forms, more for the chunked ones."""
    ys = []
    for piece in zip(*(x.split(length, -2) for x in tokens), strict=True):
        y, S = step(S, *piece)
        ys.append(y)
    return torch.cat(ys, -2), S


# [normalized]
def normalized(step: Step, length: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """y_i / Σ_j D_ij q_i·k_j: values get a last channel of ones, so that S holds z too."""
    S = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1] + 1)
    y, _ = walk(step, length, S, q, k, F.pad(v, (0, 1), value=1.0), g)
    return y[..., :-1] / y[..., -1:]


# [end]
