"""Every public module is complete after a reset: from the meta device it gets the weights of a usual one."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import linattn
from tests.test_wrong_tensors import STATES, modules


def every_module() -> dict[str, nn.Module]:
    positions: dict[str, nn.Module] = {
        "AxialPositions": linattn.AxialPositions(16, (3, 4)),
        "LearnedPositions": linattn.LearnedPositions(12, 16),
        "SinusoidalPositions": linattn.SinusoidalPositions(16),
    }
    return modules() | positions


@pytest.mark.parametrize("name", sorted({x for x in linattn.nn.__all__ if x[0].isupper()} - STATES))
def test_a_module_made_on_the_meta_device_is_complete_after_a_reset(name: str) -> None:
    with torch.device("meta"):
        module = every_module()[name]
    # uninitialised memory is NaN here
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    usual, other = (every_module()[name].state_dict() for _ in range(2))
    for key, tensor in module.state_dict().items():
        assert tensor.isfinite().all(), key
        if torch.equal(usual[key], other[key]):
            assert_close(tensor, usual[key], rtol=0, atol=0, msg=key)
