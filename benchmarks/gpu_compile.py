"""The registers, spills and shared memory of every compiled kernel, for a GPU that need not be there.

    PYTHONPATH=. python benchmarks/gpu_compile.py [--capability 90] [--widths 64 128x64] [--json FILE]

Every operator is called as always, on tensors of the CPU, and its kernels are compiled but not launched; so this also
shows that they compile. It fails where shared memory does not suffice, a pipelined loop starts a load `late`, when it
needs it, an operand of a product is overwritten (`gpu_hazards.py`), another length or batch is `recompiled`, or a
kernel is `empty`.
`--newest` assembles with the newest ptxas that Triton brings, as TRITON_PTXAS_PATH would."""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_hazards import TOOLS, disassembled, overwritten
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.jit import JITFunction

from linattn.ops.calls import CausalCall, ReadCall, SumCall
from linattn.ops.triton import bidirectional_operators, causal_operators, tiling

# of a program, in KiB; 99 elsewhere
MEMORY = {80: 163, 90: 227, 100: 227}
# a kernel that does anything needs more registers
FEWEST = 16
# those of Mamba-2 and of favor's features too
WIDTHS = ("64", "128", "256", "128x64", "256x64", "64x128")
# "gated": a decay, but neither φ nor a denominator, as in retention and Mamba-2
EXTRAS = ("none", "mask", "decay", "both", "gated")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Driver:
    """As much of a driver as the compiler asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled(capability: int, newest: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Yield the list of the kernels that are compiled inside the block; nothing is launched."""
    run, found, seen = JITFunction.run, [], set()

    def compile_only(self: Any, *args: Any, **options: Any) -> object:
        made = run(self, *args, **options | {"warmup": True})
        if made is not None and made.hash not in seen:
            seen.add(made.hash)
            found.append({"kernel": self.__name__, **describe(made, capability, newest)})
        return made

    triton.runtime.driver.set_active(Driver(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def describe(made: Any, capability: int, newest: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(made.asm["ptx"])
        ptxas = TOOLS / "ptxas-blackwell" if newest else get_ptxas(capability).path
        command = [ptxas, "-v", f"-arch={sm_arch_from_capability(capability)}", source, "-o", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        hazards = overwritten(disassembled(cubin)) if capability == 90 else []
    registers, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert registers is not None and spilled is not None, text
    return {
        "warps": made.metadata.num_warps,
        "shared": made.metadata.shared,
        "registers": int(registers[1]),
        "spilled": int(spilled[1]),
        "waits": waits(made.asm["ttgir"]),
        "late": late(made.asm["ttgir"]),
        "hazards": hazards,
    }


def _loops(text: str) -> list[str]:
    """The loops with asynchronous loads, up to what they give to the next turn."""
    return [loop for loop in re.findall(r"scf\.for .*?scf\.yield .*?:", text, re.DOTALL) if "ttg.async_wait" in loop]


def waits(text: str) -> bool:
    """Return whether a loop waits for all of its asynchronous loads before it uses the first."""
    return any(re.search(r"ttg\.async_wait .*num = (\d+)", loop)[1] == "0" for loop in _loops(text))  # type: ignore[index]


def late(text: str) -> list[str]:
    """Return the loads of such loops that are needed at once: not kept for the next turn."""
    found = []
    for loop in _loops(text):
        kept = loop.rpartition("scf.yield")[2]
        found += [x for x in re.findall(r"(%\w+) = tt\.load ", loop) if not re.search(rf"{x}\b", kept)]
    return found


def call_all(f: int, dv: int, dtype: torch.dtype, extras: str, batch: int = 2, n: int = 1100) -> None:
    """Every operator, with its gradients."""
    q, k, v = (torch.zeros(batch, n, 4, d, dtype=dtype).transpose(1, 2) for d in (f, f, dv))
    S, z = torch.zeros(batch, 4, f, dv), torch.zeros(batch, 4, f)
    normalize, feature_map = (None, "identity") if extras == "gated" else ("output", "elu_plus_one")
    log_decay = torch.zeros(batch, 4, n) if extras in ("decay", "both", "gated") else None
    key_mask = torch.ones(batch, 1, n, dtype=torch.bool) if extras in ("mask", "both") else None
    call = CausalCall(q, k, v, S, z, log_decay, key_mask, normalize, feature_map, False)
    causal_operators.gradient(call, (), causal_operators.forward(call, True))
    first = (x[..., :1, :] for x in (q, k, v))
    scalars = (None if x is None else x[..., :1] for x in (log_decay, key_mask))
    causal_operators.forward(CausalCall(*first, S, z, *scalars, normalize, feature_map, False), False)
    keys = SumCall(k, v, key_mask, feature_map)
    sums = bidirectional_operators.sum_keys(keys, True)
    bidirectional_operators.sum_keys_gradient(keys, (), sums)
    queries = ReadCall(q, *sums, normalize == "output", feature_map, dtype)
    bidirectional_operators.read_gradient(queries, (), bidirectional_operators.read(queries, True))


def compile_all(options: argparse.Namespace, widths: str, dtype: str, extras: str) -> list[dict[str, Any]]:
    """Return a row for each kernel; its `wrong` says what of it would not do."""
    memory = MEMORY.get(options.capability, 99) * 1024
    tiling.processors, tiling.shared_memory = lambda device: options.processors, lambda device: memory
    sizes = [int(size) for size in widths.split("x")]
    f, dv, rows = sizes[0], sizes[-1], []
    with compiled(options.capability, options.newest) as found:
        call_all(f, dv, DTYPES[dtype], extras)
        for entry in found:
            wrong = [name for name in ("late", "hazards") if entry[name]] + ["shared"] * (entry["shared"] > memory)
            wrong += ["empty"] * (entry["registers"] < FEWEST)
            rows.append({"widths": widths, "dtype": dtype, "extras": extras, **entry, "wrong": wrong})
        found.clear()
        call_all(f, dv, DTYPES[dtype], extras, batch=3, n=1203)
        rows += [{"widths": widths, "dtype": dtype, "extras": extras, **e, "wrong": ["recompiled"]} for e in found]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--widths", nargs="+", default=WIDTHS, help="channels, or features x channels of values")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--processors", type=int, default=132, help="1: no sequence is split")
    parser.add_argument("--extras", nargs="+", default=list(EXTRAS), choices=EXTRAS, help="a mask, and a decay")
    parser.add_argument("--newest", action="store_true", help="with the newest ptxas that Triton brings")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        calls = [(options, *call) for call in product(options.widths, options.dtypes, options.extras)]
        for some in as_completed([pool.submit(compile_all, *call) for call in calls]):
            for row in some.result():
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    wrong = [row for row in rows if row["wrong"]]
    print(f"{len(rows)} kernels, {len(wrong)} wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
