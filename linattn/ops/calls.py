"""The calls: checked arguments, as every form of an operator takes them. *b are leading dimensions."""

from typing import NamedTuple

import torch
from torch import Tensor

# the most tokens for which a form may build the whole matrix of similarities
SHORT = 128


class CausalCall(NamedTuple):
    """Checked arguments of `causal_linear_attention`. Tensors have equally many leading dimensions, each of size 1 or
    the size that all broadcast to; q has the latter, except where heads share queries. `key_mask` is (*b, n),
    `log_decay` (*b, n) or per channel (*b, n, f), with zeros for masked tokens. S (*b, f, dv) and z (*b, f) are the
    sums before the first token; `zero_state` is True if they are zeros."""

    q: Tensor
    k: Tensor
    v: Tensor
    S: Tensor
    z: Tensor
    log_decay: Tensor | None
    key_mask: Tensor | None
    normalize: str | None
    feature_map: str
    zero_state: bool

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions of the outputs."""
        of_queries, of_states = self.q.shape[:-2], self.S.shape[:-2]
        # asking torch takes as long as preparing a launch
        return of_queries if of_queries == of_states else torch.broadcast_shapes(of_queries, of_states)


class SumCall(NamedTuple):
    """Checked arguments of `summarize`, whose results are S and z. Tensors have equally many leading dimensions, which
    broadcast."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    feature_map: str

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions of the sums."""
        mask = () if self.key_mask is None else self.key_mask.shape[:-1]
        return torch.broadcast_shapes(self.k.shape[:-2], self.v.shape[:-2], mask)


class ReadCall(NamedTuple):
    """Checked arguments of `read`, whose result is y = φ(q) S in `dtype`, divided by φ(q)·z if `normalized`. Tensors
    have equally many leading dimensions, which broadcast; those of S and z are the same."""

    q: Tensor
    S: Tensor
    z: Tensor
    normalized: bool
    feature_map: str
    dtype: torch.dtype

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions of the outputs."""
        return torch.broadcast_shapes(self.q.shape[:-2], self.S.shape[:-2])


class DeltaCall(NamedTuple):
    """Checked arguments of `causal_delta_attention`. Tensors have equally many leading dimensions, each of size 1 or
    the size that all broadcast to; q has the latter. S (*b, d, dv) has the sizes that all but q broadcast to. `beta` is
    (*b, n, 1), `log_decay` (*b, n, 1) or (*b, n, d), `removal_key` (*b, n, d) or, where it is k, None. `scale`
    multiplies the outputs. There is no mask: masked tokens have zeros for keys, values, β and log decays, and so do not
    change the state."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    S: Tensor
    log_decay: Tensor | None
    removal_key: Tensor | None
    scale: float
