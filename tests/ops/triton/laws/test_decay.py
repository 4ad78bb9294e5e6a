"""The weights of a decay that kernels read, against their definition in float64."""

import pytest
import torch
from torch.testing import assert_close


@pytest.mark.parametrize("n", [1, 16, 37])
def test_weights_are_those_of_the_definition(n: int, device: torch.device) -> None:
    from linattn.ops.triton.decay_kernel import weigh

    C = 16
    log_decay = -10 * torch.rand(3, n, device=device)
    log_decay[1, n // 3 :: 7] = -torch.inf
    log_decay[2, n // 2 :: 5] = -1e3
    fields = weigh(log_decay, C).double().view(3, -1, 5, C).transpose(1, 2).flatten(2)
    assert fields.shape[-1] == -(-n // C) * C and not fields[..., n:].any()
    since, until, high, low, first = fields[..., :n].unbind(1)
    for start in range(0, n, C):
        logs = log_decay[:, start : start + C].double()
        at, places = slice(start, start + C), torch.arange(logs.shape[1], device=device)
        assert_close(since[:, at], logs.cumsum(-1).exp(), rtol=1e-5, atol=1e-30)
        rest = torch.cat([logs[:, 1:], torch.zeros_like(logs[:, :1])], -1).flip(-1).cumsum(-1).flip(-1)
        assert_close(until[:, at], rest.exp(), rtol=1e-5, atol=1e-30)
        fresh = torch.where(logs < -104, places, 0).cummax(-1)[0]
        assert torch.equal(first[:, at], fresh - C)
        pairs = ((high + low)[:, at].unsqueeze(-1) - (high + low)[:, at].unsqueeze(-2)).exp2()
        seen = (places[:, None] >= places) & (places >= fresh.unsqueeze(-1))
        later = torch.where(logs < -104, 0, logs).cumsum(-1)
        exact = (later.unsqueeze(-1) - later.unsqueeze(-2)).exp()
        assert_close(pairs[seen], exact[seen], rtol=1e-9, atol=0)
