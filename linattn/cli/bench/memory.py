"""The size of a state, and the peak memory of a call above its inputs: outputs, gradients, and all temporaries.

On a CPU each call runs in a process of its own, because a process may keep what it has taken. These are forked from
one that has imported torch and nothing more, where the system can do that."""

import ctypes
import math
import multiprocessing
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import timer

from linattn.cli.bench.cases import Case, Setup
from linattn.cli.bench.decoding_state import num_bytes
from linattn.cli.bench.workloads import prepare


class Found(NamedTuple):
    bytes: float
    seconds: float
    """Duration of one call, cold."""


def state(setup: Setup, case: Case, patience: float) -> Found:
    workload, start = prepare(setup, case), timer()
    workload.call()
    return Found(num_bytes(workload.state), timer() - start)


def peak(setup: Setup, case: Case, patience: float) -> Found:
    """Measure one call, and wait no longer than `patience` seconds for it."""
    if torch.device(setup.device).type == "cuda":
        return _peak_here(setup, case, torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated)
    with ProcessPoolExecutor(1, _context(), torch.set_num_threads, (setup.threads,)) as pool:
        try:
            return pool.submit(_peak_here, setup, case, _reset_resident, _resident_peak).result(patience)
        except TimeoutError as error:
            raise RuntimeError("no time was left for it") from error
        except BrokenProcessPool as error:
            raise RuntimeError("its process died, probably for want of memory") from error
        finally:
            # the pool would wait for the call, and for the process to tidy up
            for process in multiprocessing.active_children():
                process.kill()


@cache
def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _peak_here(setup: Setup, case: Case, reset: Callable[[], None], highest: Callable[[], float]) -> Found:
    # the first call loads libraries, which are no part of the workload: a short sequence goes first
    prepare(setup, replace(case, n=min(case.n, 64))).call()
    call = prepare(setup, case).call
    reset()
    before, start = highest(), timer()
    kept = call()
    found = Found(highest() - before, timer() - start)
    del kept
    return found


def _reset_resident() -> None:
    """Linux forgets the peak so far. Elsewhere an earlier one may hide the next, and Windows has none."""
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
