"""States that do not belong to a call are refused by name; one state may serve many sequences."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, read
from linattn.ops.operators import CAUSAL
from tests.laws import tokens

pytestmark = pytest.mark.usefixtures("unchecked")
every_backend = pytest.mark.parametrize("backend", [name for name in CAUSAL.run if name not in ("triton", "parallel")])


def a_state(*lead: int, f: int = 5, dv: int = 3, dtype: torch.dtype = torch.float64) -> LinearState:
    return LinearState(torch.rand(*lead, f, dv, dtype=dtype), torch.rand(*lead, f, dtype=dtype))


good = a_state(2, 3)
WRONG = {
    "a tuple": ((good.S, good.z), "must be a LinearState, as this layer returns it, but is a tuple"),
    "a tensor": (good.S, "but is a Tensor"),
    "no S": (LinearState(good.S[0, 0, 0, 0], good.z), r"S \(..., 5, 3\) .* but has \(\) and \(2, 3, 5\)"),
    "S is a row": (LinearState(good.S[0, 0, 0], good.z), r"but has \(3,\) and \(2, 3, 5\)"),
    "S has no heads": (LinearState(good.S[0, 0], good.z), r"but has \(5, 3\) and \(2, 3, 5\)"),
    "z is a number": (LinearState(good.S, good.z[0, 0, 0]), r"but has \(2, 3, 5, 3\) and \(\)"),
    "z has no heads": (LinearState(good.S, good.z[0, 0]), r"but has \(2, 3, 5, 3\) and \(5,\)"),
    "z has a dimension more": (LinearState(good.S, good.z[None]), r"but has \(2, 3, 5, 3\) and \(1, 2, 3, 5\)"),
    "other features": (a_state(2, 3, f=4), r"must have S \(..., 5, "),
    "other values": (a_state(2, 3, dv=4), r"must have S \(..., 5, 3\)"),
    "other heads": (a_state(2, 4), r"must broadcast, but are .*state \(2, 4\)"),
    "another batch": (a_state(4, 3), r"must broadcast, but are .*state \(4, 3\)"),
    "another dtype": (a_state(2, 3, dtype=torch.float32), "must be torch.float64 .* but is torch.float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_state_of_this_call_is_refused(wrong: str) -> None:
    state, message = WRONG[wrong]
    q, k, v = tokens(4)
    with pytest.raises(ValueError, match=message):
        causal_linear_attention(q, k, v, state)
    if wrong != "other values":
        with pytest.raises(ValueError, match=message.replace("5, 3\\) .*", "5, dv\\) .*")):
            read(q, state)


@every_backend
@pytest.mark.parametrize(("batch", "of_state"), [(2, 1), (1, 2), (0, 1)])
@pytest.mark.parametrize("n", [1, 6])
def test_a_state_broadcasts(backend: str, batch: int, of_state: int, n: int) -> None:
    """As if it were repeated, in outputs, states and gradients."""
    n = 1 if backend == "recurrent" else n
    leaves = [x[:batch].requires_grad_() for x in tokens(n, positive=True)]
    sums = [x.requires_grad_() for x in a_state(of_state, 3)[:2]]
    both = max(batch, of_state) if batch else 0

    def repeated(x: Tensor) -> Tensor:
        return x.expand(both, *x.shape[1:])

    results = []
    for change in (lambda x: x, repeated):
        y, after = causal_linear_attention(
            *map(change, leaves), LinearState(*map(change, sums)), backend=backend, feature_map="elu_plus_one"
        )
        loss = y.square().sum() + after.S.square().sum() + after.z.square().sum()
        results.append([y, after.S, after.z, *torch.autograd.grad(loss, [*leaves, *sums])])
    assert results[0][0].shape[0] == both
    assert_close(results[0], results[1])


@every_backend
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_a_state_keeps_no_other_memory_alive(backend: str, decay: str | None) -> None:
    """A view of the states of all chunks would keep them all."""
    q, k, v = tokens(1 if backend == "recurrent" else 130)
    log_decay = {None: None, "head": -k[..., 0].abs(), "channel": -k.abs()}[decay]
    for x in causal_linear_attention(q, k, v, log_decay=log_decay, backend=backend)[1]:
        assert x.untyped_storage().nbytes() == x.nbytes
