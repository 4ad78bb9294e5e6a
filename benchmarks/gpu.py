"""The kernels on this machine's GPU, in one call: are they right, and how fast, beside what else there is.

    PYTHONPATH=. python benchmarks/gpu.py [--json FILE] [--only forward,training,…] [--repeats 30] [--sweep]

First the laws (pytest on tests/ops/backends/triton/laws) and, where compute-sanitizer is, memory and races. Then times:
medians of single calls, each after the second-level cache was flushed and with the queue full, so that neither the
cache nor the time that Python takes to launch counts. Shares are the least bytes a call must move, over its time, over
what a copy reaches in the same run. What fails is reported in its row, and the rest goes on. `--smallest` runs
everything once on tiny shapes, without a GPU too (TRITON_INTERPRET=1): to see that this file works."""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linattn.ops import LinearState, causal_linear_attention, explain_backend, linear_attention
from linattn.ops.flex import flex_window
from linattn.ops.local import in_blocks
from linattn.ops.window import Window

LAWS = Path(__file__).parents[1] / "tests" / "ops" / "backends" / "triton" / "laws"
SECTIONS = ("forward", "training", "long", "step", "bidirectional", "dtypes", "local")
ELU: dict[str, Any] = {"feature_map": "elu_plus_one", "backend": "triton"}

Call = Callable[[], object]


class Row(NamedTuple):
    """One line of the table: how often the least bytes of this call could be copied is its share."""

    section: str
    name: str
    shape: str
    bytes: int
    make: Callable[[], Call]


class Machine:
    """Where times are taken: a GPU, or this process where there is none."""

    def __init__(self, smallest: bool, repeats: int) -> None:
        self.smallest, self.repeats = smallest, 1 if smallest else repeats
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.flush = torch.empty(0 if smallest else 2**28, dtype=torch.int8, device=self.device)

    def seconds(self, call: Call) -> list[float]:
        for _ in range(1 if self.smallest else 5):
            call()
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            return [time.perf_counter() - start]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, end in pairs:
            self.flush.zero_()
            # a millisecond in which the launches of the call queue up
            torch.cuda._sleep(2_000_000)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def copy_bandwidth(self) -> float:
        size = 2**12 if self.smallest else 2**30
        x, y = (torch.zeros(size, dtype=torch.int8, device=self.device) for _ in range(2))
        return 2 * size / statistics.median(self.seconds(lambda: y.copy_(x)))

    def tokens(self, rows: int, n: int, d: int, dtype: torch.dtype = torch.bfloat16, *, grad: bool) -> list[Tensor]:
        """As a layer makes them: (batch, n, heads, d), heads moved forward."""
        batch, heads = (rows // 16, 16) if rows % 16 == 0 else (1, rows)
        make = [torch.randn(batch, n, heads, d, device=self.device).to(dtype).transpose(1, 2) for _ in range(3)]
        return [x.requires_grad_(grad) for x in make]


def causal(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: causal_linear_attention(q, k, v, **ELU | options)[0]


def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, **ELU)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_linear_attention(name: str, normalize: bool) -> Callable[..., Tensor]:
    """Of the package of that name, with features given, tokens before heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        function = getattr(importlib.import_module("fla.ops.linear_attn"), name)
        return function(*(x.transpose(1, 2) for x in (q, k, v)), normalize=normalize)[0].transpose(1, 2)

    return attend


def contenders() -> dict[str, Callable[..., Tensor]]:
    found = {"linattn, elu + 1": causal(), "linattn, not normalised": causal(normalize=None), "SDPA": softmax}
    if importlib.util.find_spec("fla") is not None:
        for name in ("chunk_linear_attn", "fused_chunk_linear_attn"):
            found |= {f"fla {name}, normalised": flash_linear_attention(name, True)}
            found |= {f"fla {name}": flash_linear_attention(name, False)}
    return found


def row(
    machine: Machine, section: str, name: str, attend: Callable[..., Tensor], rows: int, n: int, d: int,
    dtype: torch.dtype = torch.bfloat16, *, training: bool = False,
) -> Row:  # fmt: skip
    """Least bytes: q, k, v and y; with gradients, q, k, v and dy again, and dq, dk and dv."""
    if machine.smallest:
        rows, n, d = 2, min(n, 40), min(d, 16)

    def make() -> Call:
        inputs = machine.tokens(rows, n, d, dtype, grad=training)
        if not training:
            return lambda: attend(*inputs)
        upstream = torch.randn_like(inputs[0])
        return lambda: torch.autograd.grad(attend(*inputs), inputs, upstream)

    size = rows * n * d * torch.empty(0, dtype=dtype).element_size()
    shape = f"B·H={rows} n={n} D={d} {str(dtype).removeprefix('torch.')}"
    return Row(section, f"{name}{', training' if training else ''}", shape, (11 if training else 4) * size, make)


def step_row(machine: Machine, batch: int, heads: int, d: int) -> Row:
    """A token, replayed as a graph where there is a GPU: the state is read and written."""
    if machine.smallest:
        batch, heads, d = 1, 2, 8

    def make() -> Call:
        q, k, v = (torch.randn(batch, heads, 1, d, device=machine.device).bfloat16() for _ in range(3))
        state = LinearState(*(torch.zeros(batch, heads, *s, device=machine.device) for s in ((d, d), (d,))))

        def step() -> object:
            return causal_linear_attention(q, k, v, state, **ELU)

        if machine.device.type == "cpu":
            return step
        with torch.no_grad():
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = step()
        return lambda: (graph.replay(), kept)

    size = batch * heads * (2 * 4 * (d * d + d) + 4 * 2 * d)
    return Row("step", "linattn, one token", f"B={batch} H={heads} D={d}", size, make)


def local_rows(machine: Machine) -> Iterator[Row]:
    """The window through FlexAttention, as it is on a GPU, and in blocks, as it is elsewhere."""
    window = Window(128, causal=True)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_window(q, k, v, window=window)

    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return in_blocks(q, k, v, window, None)

    # FlexAttention has no gradients on a CPU
    for training in (False, True) if machine.device.type == "cuda" else (False,):
        for name, run in (("flex", flex), ("in blocks", blocks)):
            yield row(machine, "local", f"window of 128, {name}", run, 128, 4096, 64, training=training)


def rows(machine: Machine) -> Iterator[Row]:
    widths, lengths = ((16,), (40,)) if machine.smallest else ((64, 128), (512, 1024, 2048, 8192))
    for section, training in (("forward", False), ("training", True)):
        for d in widths:
            for n in lengths:
                for name, attend in contenders().items():
                    yield row(machine, section, name, attend, 128, n, d, training=training)
    for training in (False, True):
        for d in widths:
            yield row(machine, "long", "linattn, elu + 1", causal(), 8, 65_536, d, training=training)
    for batch, heads, d in ((1, 16, 128), (256, 16, 128), (512, 16, 64)):
        yield step_row(machine, batch, heads, d)
    for training in (False, True):
        yield row(machine, "bidirectional", "to all keys", bidirectional, 128, 8192, 64, training=training)
        for dtype, d in ((torch.float16, 64), (torch.float16, 128), (torch.float32, 64), (torch.bfloat16, 256)):
            yield row(machine, "dtypes", "linattn, elu + 1", causal(), 128, 2048, d, dtype, training=training)
        decay = torch.full((2048 if not machine.smallest else 40,), -0.01, device=machine.device)
        yield row(machine, "dtypes", "with a decay", causal(log_decay=decay), 128, 2048, 64, training=training)
    yield from local_rows(machine)


def measure(machine: Machine, entry: Row, bandwidth: float) -> dict[str, Any]:
    found: dict[str, Any] = entry._asdict()
    del found["make"]
    try:
        seconds = machine.seconds(entry.make())
        median = statistics.median(seconds)
        share = entry.bytes / median / bandwidth
        found |= {"median_s": median, "min_s": min(seconds), "max_s": max(seconds), "share": share}
    except Exception as error:  # the run is blind: one failure must not take the other figures with it
        found["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def show(found: dict[str, Any]) -> None:
    left = f"{found['section']:13} {found['name']:42} {found['shape']:36}"
    if "error" in found:
        print(left, found["error"].splitlines()[0][:100], flush=True)
        return
    times = "–".join(f"{1e6 * found[key]:.1f}" for key in ("min_s", "max_s"))
    print(f"{left} {1e6 * found['median_s']:10.1f} µs ({times}) {100 * found['share']:6.1f} %", flush=True)


def check(command: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    tail = (done.stdout + done.stderr).splitlines()[-25:]
    verdict = "right" if done.returncode == 0 else "WRONG"
    print(f"{verdict}: {' '.join(command)[:100]}", *tail[-3:], sep="\n  ", flush=True)
    return {"command": command, "returncode": done.returncode, "tail": tail}


def checks(smallest: bool) -> list[dict[str, Any]]:
    """The laws, then every kernel once under each tool of compute-sanitizer."""
    found = []
    if importlib.util.find_spec("pytest") is None:
        print("laws: not checked, as pytest is not installed")
    elif not smallest:
        found.append(check([sys.executable, "-m", "pytest", "-q", str(LAWS)], TRITON_INTERPRET="0"))
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("memory and races: not checked, as compute-sanitizer is not on this machine")
    for tool in ("memcheck", "racecheck", "synccheck", "initcheck") if sanitizer else ():
        once = [sys.executable, __file__, "--smallest", "--only", "forward,training,step,bidirectional,dtypes"]
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *once]
        found.append(check(command, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))
    return found


def sweep(machine: Machine, bandwidth: float) -> list[dict[str, Any]]:
    """Other tiles than the rule's, for whoever writes the next rule."""
    from linattn.ops.backends.triton import tiling

    chosen, found = tiling.rule, []
    candidates = [
        tiling.Rule(C, state, warps, stages)
        for C in (32, 64, 128) for state in (2048, 4096, 8192) for warps in (4, 8) for stages in (1, 2, 3)
    ]  # fmt: skip
    for candidate in candidates[:1] if machine.smallest else candidates:
        tiling.rule = lambda *_, candidate=candidate: candidate
        for d in (64, 128):
            for training in (False, True):
                entry = row(machine, "sweep", str(tuple(candidate)), causal(), 128, 4096, d, training=training)
                found.append(measure(machine, entry, bandwidth))
                show(found[-1])
    tiling.rule = chosen
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything here too, after every row")
    parser.add_argument("--only", default=",".join(("checks", *SECTIONS)), help="of checks and " + ", ".join(SECTIONS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="also try other tiles")
    parser.add_argument("--smallest", action="store_true", help="once, on tiny shapes")
    options = parser.parse_args()
    machine, only = Machine(options.smallest, options.repeats), options.only.split(",")
    if machine.device.type == "cpu" and not options.smallest:
        parser.error("there is no GPU here; --smallest needs none")
    name = torch.cuda.get_device_name() if machine.device.type == "cuda" else "no GPU"
    record: dict[str, Any] = {"device": name, "torch": torch.__version__, "rows": []}
    print(f"{name}, torch {torch.__version__}", explain_backend(*machine.tokens(2, 5, 16, grad=False)), sep="\n")
    if "checks" in only:
        record["checks"] = checks(options.smallest)
    record["copy_bandwidth"] = bandwidth = machine.copy_bandwidth()
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")
    for entry in rows(machine):
        if entry.section in only:
            record["rows"].append(measure(machine, entry, bandwidth))
            show(record["rows"][-1])
            if options.json:
                options.json.write_text(json.dumps(record, indent=1))
    if options.sweep:
        record["sweep"] = sweep(machine, bandwidth)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    if any("error" in found for found in record["rows"]) and options.smallest:
        sys.exit("some rows failed")


if __name__ == "__main__":
    main()
