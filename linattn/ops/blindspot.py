"""Blindspot: tokens come in blocks and a query sees only the blocks before its own, so that one state per block is
enough. The sums of the unfinished block wait beside the state, so that any cut of the sequence gives the same."""

import torch
from torch import Tensor

from linattn.ops.backends import CAUSAL, CausalCall
from linattn.ops.backends.loopless import check_exported_length
from linattn.ops.state import LinearState


def run_in_blocks(call: CausalCall, state: LinearState | None, backend: str | None) -> tuple[Tensor, LinearState]:
    """Finish the open block, process whole blocks in one call, then open the next block."""
    n, size, length = call.q.shape[-2], call.blindspot, 0
    check_exported_length(n, "attention with a blindspot")
    S, z, block = call.S, call.z, (torch.zeros_like(call.S), torch.zeros_like(call.z))
    if state is not None and state.block_S is not None and state.block_z is not None:
        block = state.block_S.expand_as(S), state.block_z.expand_as(z)
        length = state.block_length
    first = min(n, -length % size)
    whole = (n - first) // size * size
    outputs = []
    for start, stop in ((0, first), (first, first + whole), (first + whole, n)):
        if start == stop and n > 0:
            continue
        part = _tokens(call._replace(S=S, z=z, fresh=False), start, stop)
        if length == 0 and (stop - start) % size == 0:
            y, S, z = CAUSAL(part, backend)
        else:
            hidden = torch.zeros_like(part.k[..., :1, 0], dtype=torch.bool).expand(*part.k.shape[:-1])
            y, S, z = CAUSAL(part._replace(key_mask=hidden, blindspot=1), backend)
            _, *block = CAUSAL(part._replace(S=block[0], z=block[1], blindspot=1, normalize=None), backend)
            length += stop - start
            if length == size:
                S, z, block, length = S + block[0], z + block[1], (block[0] * 0, block[1] * 0), 0
        outputs.append(y)
    return torch.cat(outputs, -2), LinearState(S, z, block[0], block[1], length, size)


def _tokens(call: CausalCall, start: int, stop: int) -> CausalCall:
    def cut(x: Tensor | None, dim: int) -> Tensor | None:
        return None if x is None else x.narrow(dim, start, stop - start)

    q, k, v = (x.narrow(-2, start, stop - start) for x in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, log_decay=cut(call.log_decay, -1), key_mask=cut(call.key_mask, -1))
