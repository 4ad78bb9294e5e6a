"""Which GPUs the kernels are chosen for, seen with tensors that have no memory."""

import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn.ops.backends import CausalCall
from linattn.ops.backends.triton import CAUSAL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")


def call(device: str) -> CausalCall:
    def tokens(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    q, k, v = (tokens(2, 5, 4) for _ in range(3))
    return CausalCall(q, k, v, tokens(2, 4, 4), tokens(2, 4), None, None, "output", "relu", False)


@pytest.mark.parametrize(("device", "hip"), [("cuda", "6.4"), ("xpu", None)])
def test_what_was_not_tried_runs_when_named(device: str, hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode():
        given = call(device)
        assert CAUSAL.refusal(given) == "has not been tried on this kind of GPU, and runs there when named"
        assert CAUSAL.refusal(given, named=True) is None


def test_an_old_gpu_is_refused_when_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with FakeTensorMode():
        for named in (False, True):
            assert "needs compute capability 8.0" in str(CAUSAL.refusal(call("cuda"), named=named))
