"""Which GPUs the kernels are chosen for, seen with tensors that have no memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn.ops import explain_backend
from linattn.ops.calls import CausalCall
from linattn.ops.triton import CAUSAL, support

triton = pytest.importorskip("triton", reason="Triton is made for Linux")
assembler = pytest.importorskip("linattn.ops.triton.assembler")


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


def test_an_explanation_of_attention_to_all_keys_is_of_the_queries_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys can be summed for every group of queries; reading the sums is refused for some."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(support, "_capability", lambda device: (12, 0))
    with FakeTensorMode():
        leads = (2, 3, 2, 3), (2, 1, 2, 1), (2, 3, 1, 1)
        q, apart, beside = (torch.empty(*lead, 5, 4, device="cuda") for lead in leads)
        refused, *others = explain_backend(q, apart, apart, is_causal=False).splitlines()
        assert refused.startswith("triton: takes keys shared along neighbouring dimensions, but q has (2, 3, 2, 3)")
        assert others[0] == "chunked: runs this call"
        assert explain_backend(q, beside, beside, is_causal=False).startswith("triton: runs this call")


@pytest.mark.parametrize(
    ("own", "newer", "named", "taken"),
    [
        ("12.8", "12.9", False, None),
        ("12.8", "13.0", False, None),
        ("12.8", "13.1", False, "newer"),
        ("12.9", "13.3", False, "newer"),
        ("13.1", "13.3", False, "own"),
        ("12.9", "13.1", True, None),
        ("13.2", "13.1", True, "own"),
    ],
)
def test_an_assembler_that_compiles_wrong_code_is_not_used(
    own: str, newer: str, named: bool, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper. What TRITON_PTXAS_PATH names is used or refused, and nothing is used in its place."""
    Tool = triton.knobs.NvidiaTool
    tools = SimpleNamespace(ptxas=Tool("own", own), ptxas_blackwell=Tool("newer", newer))
    monkeypatch.setattr(assembler.knobs, "nvidia", tools)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(support, "_capability", lambda device: (9, 0))
    if named:
        monkeypatch.setenv("TRITON_PTXAS_PATH", "own")
    else:
        monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assembler._choice.cache_clear()
    with FakeTensorMode():
        reason = CAUSAL.refusal(call("cuda"), named=True)
    assembler._choice.cache_clear()
    assert (reason is None) == (taken is not None)
    assert (
        taken
        or f"needs ptxas of CUDA 13.1 or newer on this GPU, as older ones compile it to wrong code, but has {own}"
        in str(reason)
    )
    assert tools.ptxas == ("newer" if taken == "newer" else Tool("own", own))


def test_a_graph_of_another_gpu_is_refused_at_its_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported graph names the kernels, and nothing chooses a backend again."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(support, "_capability", lambda device: (10, 0))
    with FakeTensorMode(), pytest.raises(NotImplementedError, match=r"^triton: is made for the compute capabilities"):
        support.on_device_of(torch.empty(1, device="cuda"))


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 is made for Triton 3.6, which has no such assembler"
)
def test_triton_brings_an_assembler_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    with triton.knobs.nvidia.scope():
        assembler._choice.cache_clear()
        assert assembler.refusal() is None
        assert assembler.version(triton.knobs.nvidia.ptxas) >= assembler.OLDEST
    assembler._choice.cache_clear()


def test_one_graph_asks_for_the_assembler() -> None:
    """Triton reads its own environment by functions that a graph cannot hold."""

    def layer(x: Tensor) -> Tensor:
        return x + 1 if support._assembler_cannot() is None else x - 1

    with triton.knobs.nvidia.scope():
        assembler._choice.cache_clear()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert float(compiled(torch.zeros(()))) == float(layer(torch.zeros(())))
    assembler._choice.cache_clear()
