"""The form of exported graphs agrees with the definition, before any exporter has a part in it."""

import pytest
import torch
from torch.testing import assert_close

from linattn.ops.calls import CausalCall
from linattn.ops.definitions import linear as definition
from linattn.ops.plain import linear
from linattn.ops.tokens.cutting import running_max


@pytest.mark.parametrize("normalize", ["output", "keys", None])
@pytest.mark.parametrize("decay", [None, "finite", "resets"])
@pytest.mark.parametrize("n", [0, 1, 130])
def test_it_is_the_definition(n: int, decay: str | None, normalize: str | None) -> None:
    for masked in (False, True):
        # three key heads for two queries each, and values that all heads share
        q, k, v = torch.randn(2, 3, 2, n, 5), torch.randn(2, 3, 1, n, 5), torch.randn(2, 1, 1, n, 4)
        S, z = torch.randn(2, 3, 1, 5, 4), torch.rand(2, 3, 1, 5)
        inputs = [x.double().requires_grad_() for x in (q, k, v, S, z)]
        log_decay = None
        if decay is not None:
            log_decay = -torch.rand(2, 1, 1, n, dtype=torch.float64)
            log_decay[..., n // 2 : n // 2 + 1] = -torch.inf if decay == "resets" else -20
            inputs.append(log_decay.requires_grad_())
        key_mask = torch.rand(2, 1, 1, n) < 0.6 if masked else None
        call = CausalCall(*inputs[:5], log_decay, key_mask, normalize, "elu_plus_one", False)
        found, expected = linear.forward(call, False), definition.causal(call, False)
        assert_close(found, expected)
        upstream = [torch.randn_like(x) for x in found]
        assert_close(
            torch.autograd.grad(found, inputs, upstream, materialize_grads=True),
            torch.autograd.grad(expected, inputs, upstream, materialize_grads=True),
        )


@pytest.mark.parametrize("n", [0, 1, 64, 65, 300])
def test_running_maximum(n: int) -> None:
    x = torch.randn(2, 3, n)
    x[0, 0, :3] = -torch.inf
    assert_close(running_max(x), x.cummax(-1).values, rtol=0, atol=0)
