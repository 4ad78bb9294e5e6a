"""Other processes for tests, as copies of one that has imported everything once."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

needs_processes = pytest.mark.skipif(
    os.name == "nt" or not dist.is_available(), reason="needs gloo and files to meet in"
)
METHOD = "spawn" if os.name == "nt" else "forkserver"
# the imports take most of the time of a new process, and those of tests that build models of every kind
IMPORTS = [
    "linattn.cli.training",
    "linattn.linearize.command.run",
    "torch.distributed.fsdp",
    "pydantic.type_adapter",
    "tests.models.causal",
    "tests.processes",
    "tests.frozen",
]


def run_in_another(work: Callable[..., None], *arguments: Any) -> int | None:
    """Run work(*arguments) in another process, and return the code with which it exits: −9 if it is killed."""
    multiprocessing.set_forkserver_preload(IMPORTS)
    process = multiprocessing.get_context(METHOD).Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def run_in_two(work: Callable[..., None], *arguments: Any) -> None:
    """Run work(rank, *arguments) in both processes of a group."""
    run_in_group(2, work, *arguments)


def run_in_group(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(rank, *arguments) in each process of a group."""
    multiprocessing.set_forkserver_preload(IMPORTS)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_join, (size, folder, work, arguments), nprocs=size, start_method=METHOD)


def _join(rank: int, size: int, folder: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    work(rank, *arguments)
    # together: a process whose partner has gone while it still talks to it may abort
    dist.barrier()
    dist.destroy_process_group()
