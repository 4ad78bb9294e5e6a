"""What the compiler makes of every kernel: registers, spills and shared memory, for a GPU that need not be there.

    PYTHONPATH=. python benchmarks/gpu_compile.py [--capability 90] [--widths 64 128 256] [--json FILE]

Every operator is called as always, on tensors of the CPU, and its kernels are compiled but not launched; so this also
shows that they compile, that calls with other lengths and batches need no other kernels, that pipelined loops do not
wait for their own loads, and that no operand of a product is overwritten (`gpu_hazards.py`). `--newest` assembles with
the newest ptxas that Triton brings, as TRITON_PTXAS_PATH would."""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_hazards import TOOLS, disassembled, overwritten
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from linattn.ops.backends import CausalCall, ReadCall, SumCall
from linattn.ops.backends.triton import bidirectional_operators, causal_operators, tiling

# of a program, in KiB; 99 elsewhere
MEMORY = {80: 163, 90: 227, 100: 227}
EXTRAS = ("none", "mask", "both")
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
    """What is compiled meanwhile; nothing is launched."""
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
        architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
        command = [
            TOOLS / ("ptxas-blackwell" if newest else "ptxas"),
            "-v",
            f"-arch={architecture}",
            source,
            "-o",
            cubin,
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        hazards = overwritten(disassembled(cubin)) if capability == 90 else []
    registers, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert registers is not None and spilled is not None, text
    return {
        "warps": made.metadata.num_warps,
        "stages": made.metadata.num_stages,
        "shared": made.metadata.shared,
        "registers": int(registers[1]),
        "spilled": int(spilled[1]),
        "waits": waits(made.asm["ttgir"]),
        "hazards": hazards,
    }


def waits(text: str) -> bool:
    """Return whether a loop waits for all of its asynchronous loads before it uses the first."""
    loops = re.findall(r"scf\.for .*?scf\.yield", text, re.DOTALL)
    first = (re.search(r"ttg\.async_wait .*num = (\d+)", loop) for loop in loops)
    return any(found is not None and found[1] == "0" for found in first)


def call_all(d: int, dtype: torch.dtype, *, extras: str, batch: int = 2, n: int = 1100) -> None:
    """Every operator, with its gradients."""
    q, k, v = (torch.zeros(batch, n, 4, d, dtype=dtype).transpose(1, 2) for _ in range(3))
    S, z = torch.zeros(batch, 4, d, d), torch.zeros(batch, 4, d)
    log_decay = torch.zeros(batch, 4, n) if extras == "both" else None
    key_mask = torch.ones(batch, 1, n, dtype=torch.bool) if extras != "none" else None
    call = CausalCall(q, k, v, S, z, log_decay, key_mask, "output", "elu_plus_one", False)
    causal_operators.gradient(call, (), causal_operators.forward(call, True))
    first = (x[..., :1, :] for x in (q, k, v))
    scalars = (None if x is None else x[..., :1] for x in (log_decay, key_mask))
    causal_operators.forward(CausalCall(*first, S, z, *scalars, "output", "elu_plus_one", False), False)
    keys = SumCall(k, v, key_mask, "elu_plus_one")
    sums = bidirectional_operators.sum_keys(keys, True)
    bidirectional_operators.sum_keys_gradient(keys, (), sums)
    queries = ReadCall(q, *sums, "output", "elu_plus_one", dtype)
    bidirectional_operators.read_gradient(queries, (), bidirectional_operators.read(queries, True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--processors", type=int, default=132, help="1: no sequence is split")
    parser.add_argument("--extras", nargs="+", default=list(EXTRAS), choices=EXTRAS, help="a mask, and a decay")
    parser.add_argument("--newest", action="store_true", help="with the newest ptxas that Triton brings")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tiling.processors = lambda device: options.processors
    memory = MEMORY.get(options.capability, 99) * 1024
    tiling.shared_memory = lambda device: memory
    rows = []
    with compiled(options.capability, options.newest) as found:
        for d in options.widths:
            for dtype in options.dtypes:
                for extras in options.extras:
                    call_all(d, DTYPES[dtype], extras=extras)
                    for entry in found:
                        rows.append({"D": d, "dtype": dtype, "extras": extras, **entry})
                        assert entry["shared"] <= memory, f"{entry} has {memory} bytes"
                        assert not entry["hazards"], entry
                        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
                    found.clear()
                    call_all(d, DTYPES[dtype], extras=extras, batch=3, n=1203)
                    assert not found, f"another batch and another length were compiled anew: {found}"
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
