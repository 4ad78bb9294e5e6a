"""The memory that a command needs at least, compared with what the machine has, before it is allocated.

On Linux the system grants more memory than there is, and later kills the process that uses it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from linattn.console.errors import CommandError

TRAINED_BYTES = {"adamw": 16, "muon": 12}
"""Bytes per parameter that trains, at least: its value, its gradient, and two averages or one, in float32. The weights
that Muon moves by AdamW have two as well."""

PROBE = 256
"""The most tokens on which activations are measured; they grow no slower than the tokens."""
# the names of a control group's limit, usage and cached files
VERSION_1, VERSION_2 = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), ("max", "current", "inactive_file")


def require_memory(needs: Mapping[str, float], available: float, smaller: str) -> None:
    """Raise CommandError if the `needs` add up to more bytes than are `available`. The error names each need by its
    key, and ends with `smaller`, the advice what to change."""
    if (total := sum(needs.values())) > available:
        parts = ", ".join(f"{shown(size)} for {what}" for what, size in needs.items())
        raise CommandError(
            f"this needs at least {shown(total)} of memory, but {shown(available)} are available: {parts}; {smaller}"
        )


def shown(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def available_memory(*, cpu: bool) -> float:
    """Return the free bytes of the first GPU's memory. Without a GPU, or if `cpu`, return those of the machine's
    memory."""
    if torch.cuda.is_available() and not cpu:
        return float(torch.cuda.mem_get_info()[0])
    import psutil

    memory = psutil.virtual_memory()
    if sys.platform != "linux":
        # what other systems call available is not all that they can make available
        return float(memory.total)
    return min([float(memory.available + psutil.swap_memory().free), *cgroup_limits()])


def cgroup_limits(root: Path = Path("/")) -> Iterator[float]:
    """Yield the bytes that each control group of this process, such as a container's, still allows: its limit less what
    it uses. `root` is the file system's."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = VERSION_1 if controllers else VERSION_2
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            # a file that is missing, or a limit that is "max", is no limit
            with suppress(OSError, ValueError):
                yield _left(folder, *names)
            if folder == top:
                break


def _left(folder: Path, limit: str, usage: str, cached: str) -> float:
    """Return the bytes that a control group still allows: its limit less the memory in use; cached files do not count
    as in use. In its `folder`, the file memory.`limit` has the limit, memory.`usage` the memory in use, and the line
    `cached` of memory.stat the cached files."""
    limit_bytes, used = (int((folder / f"memory.{name}").read_text()) for name in (limit, usage))
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return float(limit_bytes - used + int(statistics.get(cached, 0)))


def num_parameters(build: Callable[[], nn.Module]) -> int:
    """Count the parameters of a model that is built without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def activation_bytes(call: Callable[[], object], model: nn.Module) -> int:
    """Measure the bytes that a call of the model saves for its gradient, beside the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    # dropout must not draw from the training's randomness
    with torch.random.fork_rng(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        # the result keeps what was saved, so that no two tensors have the same place
        result = call()
        total = sum(saved.values())
        del result
    return total
