"""The processes of a command: how they share the sequences of an update, and what they do when one of them fails."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# documented, but not in the list of what the module exports
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from linattn.cli.options import TrainOptions
from linattn.console.errors import CommandError, one_line, writing
from linattn.console.lock import locked

# messages of gloo, whose errors have no class of their own, about a process that has ended
GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def check_sharing(options: TrainOptions, processes: int) -> None:
    """Raise ValueError unless this number of `processes` can run with --sequence-parallel, --segment and --context as
    they are."""
    ranks = options.sequence_parallel
    for name in ("segment", "carry"):
        if ranks > 1 and getattr(options, name) is not None:
            raise ValueError(f"--{name} does not work with --sequence-parallel")
    if processes % ranks:
        raise ValueError(f"--sequence-parallel {ranks} must divide the number of processes, but there are {processes}")
    if options.context % ranks:
        raise ValueError(f"--sequence-parallel {ranks} must divide --context, but that is {options.context:,}")


def sequences_per_update(options: TrainOptions, processes: int) -> int:
    return options.batch * options.accumulate * (processes // options.sequence_parallel)


def with_updates_of(options: TrainOptions, sequences: int, processes: int, accumulate: int | None) -> TrainOptions:
    """Return the options of a resumed run with --accumulate such that an update takes as many `sequences` as before,
    for any number of processes. Raise CommandError if no --accumulate does that, or only another one than the user gave
    (`accumulate`, None: not given)."""
    at_a_time = options.batch * (processes // options.sequence_parallel)
    if sequences % at_a_time == 0 and accumulate in (None, sequences // at_a_time):
        return replace(options, accumulate=sequences // at_a_time)
    given = "" if accumulate is None else f" and --accumulate {accumulate}"
    batches, rest = divmod(sequences, accumulate or 1)
    groups, choices = processes // options.sequence_parallel, list[str]()
    if not rest and batches % options.batch == 0:
        numbers = [options.sequence_parallel * number for number in _numbers(batches // options.batch, accumulate)]
        choices.append(f"{_listed(numbers)} {'process' if numbers == [1] else 'processes'}")
    if not rest and batches % groups == 0:
        choices.append(f"--batch {_listed(_numbers(batches // groups, accumulate))}")
    raise CommandError(
        f"an update of the run takes {sequences} sequences, but {processes} processes with --batch {options.batch}"
        f"{given} take another number: choose {', or '.join(choices) or 'other numbers'}"
    )


def _numbers(product: int, accumulate: int | None) -> list[int]:
    """Return the numbers that a message suggests: all divisors of `product` if --accumulate is free, otherwise
    `product` alone."""
    return [i for i in range(1, product + 1) if product % i == 0] if accumulate is None else [product]


def _listed(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def is_restart() -> bool:
    """Tell whether torchrun has started the processes again, because one of them had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


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
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_available() and not dist.is_initialized()


@contextmanager
def joined_processes(*, cpu: bool) -> Iterator[dist.ProcessGroup | None]:
    """Join the processes inside the block. Return their group, None if there is one process."""
    if joins := must_join():
        join_processes(cpu=cpu)
    try:
        yield dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    finally:
        if joins:
            dist.destroy_process_group()


def first_process_only(rank: int, out: Path, action: Callable[[], None]) -> None:
    """Run the action, which writes `out`, in the first process while the others wait; if it fails, all end."""
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            with writing(out):
                action()
        except (CommandError, OSError) as error:
            failure = [one_line(error)]
    if dist.is_available() and dist.is_initialized():
        accelerator = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else None
        dist.broadcast_object_list(failure, device=accelerator)
    if failure[0] is not None:
        raise CommandError(failure[0]) if rank == 0 else SystemExit(2)


@contextmanager
def reported_by_first(rank: int) -> Iterator[None]:
    """Let only the first process report an error that all of them raise."""
    try:
        yield
    except CommandError as error:
        if rank == 0:
            raise
        raise SystemExit(error.status) from None


def has_lost_process(error: BaseException | None) -> bool:
    """Tell whether an error comes from another process that has ended."""
    while error is not None:
        if isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_after_loss(rank: int, folder: Path, message: str) -> SystemExit | CommandError:
    """Return the error with which this process ends when another one has ended early. Only one process reports the
    `message`: rank 0, which holds the lock of the folder, or rank 1 if rank 0 has ended."""
    if rank == 1:
        with suppress(CommandError), locked(folder):
            return CommandError(message, status=1)
    return CommandError(message, status=1) if rank == 0 else SystemExit(1)
