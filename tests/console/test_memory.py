"""What a command needs is measured, and compared with what the machine and its control groups leave."""

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from linattn.console.errors import CommandError, explained, out_of_memory
from linattn.console.memory import activation_bytes, available_memory, cgroup_limits, num_parameters, require_memory


def group(folder: Path, prefix: str, limit: object, usage: int, cached: str) -> None:
    folder.mkdir(parents=True)
    (folder / f"memory.{'max' if prefix == '' else 'limit_in_bytes'}").write_text(f"{limit}\n")
    (folder / f"memory.{'current' if prefix == '' else 'usage_in_bytes'}").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cached}\n")


def test_every_control_group_above_a_process_counts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    assert list(cgroup_limits(tmp_path)) == []
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/job/own\n1:name=systemd:/\n0::/job/own\n")
    top = tmp_path / "sys/fs/cgroup"
    group(top / "memory/job", "v1", 1000, 700, "total_inactive_file 100")
    group(top / "job", "", "max", 5, "inactive_file 0")
    group(top / "job/own", "", 300, 200, "inactive_file 50")
    assert sorted(cgroup_limits(tmp_path)) == [150.0, 400.0]


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/docker/of the host\n")
    group(tmp_path / "sys/fs/cgroup", "", 300, 100, "inactive_file 0")
    assert list(cgroup_limits(tmp_path)) == [200.0]


def test_the_machine_has_memory_and_less_in_a_group(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("linattn.console.memory.cgroup_limits", lambda: [])
    assert 0 < available_memory(cpu=True) <= psutil.virtual_memory().total + psutil.swap_memory().total
    monkeypatch.setattr("linattn.console.memory.cgroup_limits", lambda: [5.0, 7.0])
    assert available_memory(cpu=True) == 5.0
    monkeypatch.setattr("sys.platform", "another")
    assert available_memory(cpu=True) == psutil.virtual_memory().total


def test_what_does_not_fit_is_told_with_its_parts():
    needs = {"the weights": 3e9, "a batch": 2e9}
    require_memory(needs, 5e9, "less is less")
    message = r"at least 5\.0 GB .* 4\.9 GB are available: 3\.0 GB for the weights, 2\.0 GB for a batch; less is less"
    with pytest.raises(CommandError, match=message):
        require_memory(needs, 4.9e9, "less is less")


@pytest.mark.usefixtures("unchecked")
def test_a_model_is_counted_without_memory():
    assert num_parameters(lambda: nn.Linear(10**6, 10**6)) == 10**12 + 10**6


def test_the_activations_are_those_that_the_gradient_needs():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))
    x, state = torch.randn(5, 8), torch.get_rng_state()
    # x and the result of tanh; dropout saves its mask, of a byte or of a number each, and its result
    assert activation_bytes(lambda: model.eval()(x), model) == 4 * 5 * (8 + 16)
    assert 4 * 5 * (8 + 16 + 16) < activation_bytes(lambda: model.train()(x), model) <= 4 * 5 * (8 + 16 + 16 + 16)
    assert torch.equal(torch.get_rng_state(), state), "a training would draw other numbers"


ALLOCATIONS = {
    "python": lambda: bytearray(2**62),
    "numpy": lambda: np.zeros(2**50),
    "torch": lambda: torch.empty(2**60),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_every_allocation_that_fails_is_known(name):
    with pytest.raises((MemoryError, RuntimeError)) as error, explained("another reason", RuntimeError):
        ALLOCATIONS[name]()
    assert "allocat" in out_of_memory(error.value)


def test_a_gpus_too_and_no_other_error():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8 GiB"
    )
    assert out_of_memory(error) == "20.00 GiB could not be allocated"
    assert out_of_memory(RuntimeError("shapes differ")) is None
    assert out_of_memory(ValueError("out of memory")) is None
