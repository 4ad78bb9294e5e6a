"""The operator in three of its forms, for tests of what torch makes of them."""

from functools import partial

import torch
from torch import Tensor

from linattn.ops import causal_linear_attention, linear_attention

# without `strict`, torch 2.11 cannot merge two dimensions in front of one of any length, as grouped heads do
export = partial(torch.export.export, strict=torch.__version__.startswith("2.11."))
OPTIONS = {"feature_map": "elu_plus_one"}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, **OPTIONS)[0]


def over_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, **OPTIONS)


def decaying(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, log_decay=-k[..., 0].exp(), normalize="keys", **OPTIONS)[0]


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A decay per channel."""
    return causal_linear_attention(q, k, v, log_decay=-k.exp(), **OPTIONS)[0]


def sharing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads that share queries and keys."""
    log_decay = -v[..., 0].exp()
    return causal_linear_attention(q[:, :1], k[:, :1], v, log_decay=log_decay, normalize=None, **OPTIONS)[0]
