"""The processes of a command, which torchrun or Accelerate has started: how they meet, average gradients and report,
and what they do when one of them fails."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

# documented, but not in the list of what the module exports
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from linattn.console.errors import CommandError, one_line, writing
from linattn.console.lock import POLL_SECONDS, locked

# messages of gloo, whose errors have no class of their own, about a process that has ended
GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
T = TypeVar("T")
BUCKET = 25 * 2**20
"""The bytes of gradients that are averaged at a time."""


def rank() -> int:
    """Return the number of this process among those that torchrun has started, also before they have joined."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes that torchrun has started, also before they have joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_restart() -> bool:
    """Tell whether torchrun has started the processes again, because one of them had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launch_name() -> str | None:
    """Return the name of the torchrun command that has started this process, also after restarts; None without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    # without --rdzv-id, all commands have this name; on one machine, torchrun is the parent of its processes
    alone = name == "none" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    return f"{socket.gethostname()} {os.getppid()}" if alone else name


def join_processes(*, cpu: bool) -> None:
    """Join the processes that torchrun has started, each with a GPU unless `cpu` forbids it."""
    on_gpu, options = torch.cuda.is_available() and not cpu, dict[str, Any]()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if is_restart() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store, where processes would find the addresses of those that have ended
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False)
        options["store"] = PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        options |= {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("nccl" if on_gpu else "gloo", **options)


def must_join() -> bool:
    """Tell whether torchrun has started several processes, which have not joined yet."""
    return world_size() > 1 and dist.is_available() and not dist.is_initialized()


@contextmanager
def joined_processes(*, cpu: bool) -> Iterator[dist.ProcessGroup | None]:
    """Join the processes inside the block. Return their group, None if there is one process."""
    if joins := must_join():
        join_processes(cpu=cpu)
    try:
        yield dist.group.WORLD if have_joined() else None
    finally:
        if joins:
            dist.destroy_process_group()


def have_joined() -> bool:
    """Tell whether this process is one of a group."""
    return dist.is_available() and dist.is_initialized()


def message_device() -> torch.device | None:
    """Return the device of small messages, None for the CPU."""
    return torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else None


def from_first(x: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the x of the first process of the group (None: of all)."""
    if not have_joined():
        return x
    objects = [x]
    dist.broadcast_object_list(objects, group=group, group_src=0, device=message_device())
    return objects[0]


def average_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the processes of the group (None: all), which have gradients of the same
    parameters. Of a DTensor, the shard of this process counts."""
    gradients = [x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad for x in parameters if x.grad is not None]
    size, buckets = 0, dict[tuple[Any, int], list[Tensor]]()
    for gradient in gradients:
        size += gradient.numel() * gradient.element_size()
        buckets.setdefault((gradient.dtype, size // BUCKET), []).append(gradient)
    for bucket in buckets.values():
        # some backends have no mean
        mean = torch.cat([x.flatten() for x in bucket]) / dist.get_world_size(group)
        dist.all_reduce(mean, group=group)
        for gradient, part in zip(bucket, mean.split([x.numel() for x in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def first_process_only(rank: int, out: Path, action: Callable[[], T]) -> T:
    """Run the action, which writes `out`, in the first process while the others wait; all return its result. If it
    fails, all end."""
    failure, result = None, None
    with _waiting_for_first(rank):
        if rank == 0:
            try:
                with writing(out):
                    result = action()
            except (CommandError, OSError) as error:
                failure = one_line(error)
    failure, result = from_first((failure, result))
    if failure is not None:
        raise CommandError(failure) if rank == 0 else SystemExit(2)
    return cast(T, result)


@contextmanager
def _waiting_for_first(rank: int) -> Iterator[None]:
    """Let the other processes wait at the end of the block for the first one, however long it takes. In a collective
    they would wait for minutes only."""
    group = dist.group.WORLD if have_joined() else None
    if group is None:
        yield
        return
    store = group.get_group_store()
    end = f"end of block {store.add(f'blocks of rank {rank}', 1)}"
    try:
        yield
    finally:
        if rank == 0:
            store.set(end, "")
    while rank > 0 and not store.check([end]):
        time.sleep(POLL_SECONDS)


@contextmanager
def reported_by_first(rank: int) -> Iterator[None]:
    """Let only the first process report an error that all of them raise. torchrun's own report has those of all."""
    try:
        yield
    except CommandError as error:
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # as torch's ErrorHandler writes it, but without a traceback
            message = {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": message}))
        if rank == 0:
            raise
        raise SystemExit(error.status) from None


@contextmanager
def ending_together(rank: int, out: Path | None, message: str) -> Iterator[None]:
    """Let one process alone report what ends all of them inside the block: an error that all raise, or, by the
    `message`, that another process has ended. The first process holds the lock of `out`. Without `out`, no process
    reports that the first one has ended, as torchrun does."""
    try:
        with reported_by_first(rank):
            yield
    except RuntimeError as error:
        if not has_lost_process(error):
            raise
        raise end_after_loss(rank, out, message) from error


def has_lost_process(error: BaseException | None) -> bool:
    """Tell whether an error comes from another process that has ended."""
    while error is not None and have_joined():
        if isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_after_loss(rank: int, folder: Path | None, message: str) -> SystemExit | CommandError:
    """Return the error with which this process ends when another one has ended early. Only one process reports the
    `message`: rank 0, which holds the lock of the folder, or rank 1 if rank 0 has ended."""
    if rank == 1 and folder is not None:
        with suppress(CommandError), locked(folder):
            return CommandError(message, status=1)
    return CommandError(message, status=1) if rank == 0 else SystemExit(1)
