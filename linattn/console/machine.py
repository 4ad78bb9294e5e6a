"""The machine on which something is measured, and the memory that a process takes of it."""

import ctypes
import os
import platform
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from linattn.version import __version__


def machine_facts(device: str, threads: int) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "linattn": __version__,
        "device": device,
        "date": timestamp(),
        "gpu": torch.cuda.get_device_name(device) if device == "cuda" else None,
    }


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def forget_peak() -> None:
    """Make Linux forget the process's peak of memory so far. Other systems keep the old peak, so a lower one is not
    seen."""
    if (forget := Path("/proc/self/clear_refs")).exists():
        # free memory that the process keeps would hide new allocations
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        forget.write_text("5")


def peak_bytes() -> float:
    """Return the most bytes of memory that this process has had at once."""
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset)
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
