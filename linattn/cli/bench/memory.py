"""Peak memory of a call, above its inputs: outputs, gradients, and all that is needed on the way.

On a CPU each is measured in a process of its own, as what a process has taken it may keep. Those are forked from one
that has imported torch and nothing more, where the system can do that."""

import ctypes
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from linattn.cli.bench.cells import Cell, Setup
from linattn.cli.bench.works import prepare


class Peak(NamedTuple):
    bytes: float
    seconds: float
    """Of that one call, cold."""


class Failed(Exception):
    """Why there is no figure."""


def peak(setup: Setup, cell: Cell, patience: float) -> Peak:
    """Waits no longer than `patience` seconds."""
    if torch.device(setup.device).type == "cuda":
        return _here(setup, cell, lambda: _reset_cuda(setup.device), lambda: _cuda_peak(setup.device))
    return _in_a_process(setup, cell, patience)


def total_memory(device: str) -> float:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else float("inf")


@cache
def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _in_a_process(setup: Setup, cell: Cell, patience: float) -> Peak:
    context: Any = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, setup, cell), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(patience):
            raise Failed("no time was left for it")
        answer = ours.recv()
    except EOFError as error:
        raise Failed("its process died, probably for want of memory") from error
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise Failed(answer)
    return answer


def _child(connection: Connection, setup: Setup, cell: Cell) -> None:
    torch.set_num_threads(setup.threads)
    try:
        connection.send(_here(setup, cell, _reset_resident, _resident_peak))
    # whatever a contender cannot do is told to the one who waits
    except Exception as error:
        connection.send(" ".join(str(error).split())[:200] or type(error).__name__)


def _here(setup: Setup, cell: Cell, reset: Callable[[], None], highest: Callable[[], float]) -> Peak:
    """What the first call loads is no part of the work, so a short sequence goes before."""
    small = prepare(setup, replace(cell, n=min(cell.n, 64)))
    with torch.set_grad_enabled(small.grad):
        small.begin()()
    work = prepare(setup, cell)
    reset()
    before, start = highest(), time.perf_counter()
    with torch.set_grad_enabled(work.grad):
        call = work.begin()
        seconds = time.perf_counter() - start
        kept = call()
    after = highest()
    seconds = time.perf_counter() - start - seconds
    del kept
    return Peak(after - before, seconds)


def _reset_resident() -> None:
    """Linux forgets the peak so far; elsewhere an earlier one may hide what follows; Windows has none."""
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        # free memory that the process keeps would hide what is taken next
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        forget.write_text("5")


def _resident_peak() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024.0 * int(line.split()[1])
    if os.name == "nt":
        return math.nan
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _reset_cuda(device: str) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)


def _cuda_peak(device: str) -> float:
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device))
