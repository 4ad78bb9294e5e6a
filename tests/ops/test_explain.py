"""What `explain_backend` says, on a machine without a GPU."""

import pytest
import torch

from linattn.ops import LinearState, causal_linear_attention, explain_backend, linear_attention
from tests.laws import tokens


def choice(text: str) -> str:
    """The backend that the explanation says runs the call."""
    chosen = [line.split(":")[0] for line in text.splitlines() if line.endswith("runs this call")]
    assert len(chosen) == 1
    return chosen[0]


@pytest.mark.parametrize(
    ("n", "options", "expected"),
    [(5, {}, "parallel"), (200, {}, "chunked"), (1, {}, "recurrent"), (5, {"normalize": "keys"}, "chunked")],
)
def test_it_names_the_backend_that_runs(n: int, options: dict[str, str], expected: str) -> None:
    text = explain_backend(*tokens(n), **options)
    assert choice(text) == expected
    assert text.splitlines()[0] == "triton: needs CUDA or XPU tensors, but they are on cpu"
    assert "reference: can run it, when named" in text


def test_a_state_is_part_of_the_call() -> None:
    q, k, v = tokens(5)
    _, state = causal_linear_attention(q, k, v)
    assert choice(explain_backend(q, k, v, LinearState(state.S, state.z))) == "parallel"


def test_arguments_of_another_operator_are_refused() -> None:
    q, k, v = tokens(5)
    decay, beta = -torch.rand(5), torch.rand(5)
    y, state = causal_linear_attention(q, k, v)
    for options in ({"log_decay": decay}, {"state": state}):
        with pytest.raises(ValueError, match="state and log_decay are of causal attention"):
            explain_backend(q, k, v, is_causal=False, **options)
    for options in ({"normalize": None}, {"feature_map": "relu"}, {"is_causal": False}):
        with pytest.raises(ValueError, match="beta is of the delta rule"):
            explain_backend(q, k, v, beta=beta, **options)
    with pytest.raises(ValueError, match="the state must be a Tensor"):
        explain_backend(q, k, v, state, beta=beta)
    with pytest.raises(ValueError, match="the state must be a LinearState"):
        explain_backend(q, k, v, y)


def test_attention_to_all_keys() -> None:
    q, k, v = tokens(5, 7)
    assert choice(explain_backend(q, k, v, is_causal=False)) == "chunked"
    with pytest.raises(ValueError, match="leading dimensions must broadcast, but are q"):
        explain_backend(q[:, :2], k, v, is_causal=False)


@pytest.mark.parametrize("attend", [causal_linear_attention, linear_attention])
def test_a_named_backend_says_why_it_cannot(attend: object) -> None:
    with pytest.raises(NotImplementedError, match="triton: needs CUDA or XPU tensors, but they are on cpu"):
        attend(*tokens(5), backend="triton")  # type: ignore[operator]
