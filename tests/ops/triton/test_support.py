"""Which GPUs the kernels are chosen for, seen with tensors that have no memory."""

import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn.ops.calls import CausalCall
from linattn.ops.triton import CAUSAL, support

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


@pytest.mark.parametrize(("capability", "taken"), [((7, 5), False), ((8, 6), True), ((10, 0), False), ((12, 0), True)])
@pytest.mark.parametrize("named", [False, True])
def test_a_gpu_that_kernels_are_not_compiled_for_is_refused_when_named_too(
    capability: tuple[int, int], taken: bool, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(support, "_capability", lambda device: capability)
    with FakeTensorMode():
        reason = CAUSAL.refusal(call("cuda"), named=named)
    assert (reason is None) == taken
    assert taken or "made for the compute capabilities 8, 9, 12, but the device has" in str(reason)
