"""The memory of each stage of a conversion, counted without memory: the stages run on tensors that have shapes only.

python -m benchmarks.conversion_memory --model llama-3-8b --lora 8 --checkpointing

Counted are the most bytes of tensors that are alive at once, with the forms of the operators for CPUs. What a GPU's
allocator and libraries take comes on top, often a tenth. A model of many layers is counted with two and with three of
them, and each phase of a step grows by the difference for each further layer; `--exact` counts all layers. `--measure`
runs the model, too, which needs the memory, and shows what new processes take."""

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from linattn.console.machine import forget_peak, peak_bytes
from linattn.linearize import Budget, convert, fine_tune, plan, scores, training, transfer

stages_module: Any = importlib.import_module("linattn.linearize.stages")


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8_192,
    }


CONFIGS: dict[str, tuple[type[PreTrainedConfig], Any]] = {
    "smollm2-135m": (LlamaConfig, _llama(576, 1_536, 30, 9, 3, 49_152, True)),
    "smollm2-1.7b": (LlamaConfig, _llama(2_048, 8_192, 24, 32, 32, 49_152, True)),
    "qwen2.5-0.5b": (Qwen2Config, _llama(896, 4_864, 24, 14, 2, 151_936, True)),
    "llama-3.2-1b": (LlamaConfig, _llama(2_048, 8_192, 16, 32, 8, 128_256, True)),
    "llama-3-8b": (LlamaConfig, _llama(4_096, 14_336, 32, 32, 8, 128_256, False)),
    "small": (LlamaConfig, _llama(512, 1_408, 4, 8, 4, 32_000, True)),
}


REPEATS = 3
WARM_UP = {"num_hidden_layers": 1, "vocab_size": 64}


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, `live`, and the highest number in each phase, `peaks`."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.phase = 0, ""
        self.seen: set[int] = set()
        self.peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """Begin a phase, or go on with it."""
        self.phase = phase
        self.peaks[phase] = max(self.live, self.peaks.get(phase, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (values := _without_data(func, args)) is not None:
            return values
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.add(x)
        return result

    def add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if (key := storage._cdata) not in self.seen:
            self.seen.add(key)
            self.live += storage.nbytes()
            self.peaks[self.phase] = max(self.live, self.peaks.get(self.phase, 0))
            weakref.finalize(storage, self._free, key, storage.nbytes()).atexit = False

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def _without_data(func: Any, args: Any) -> Any:
    """Return a result for operators that read numbers, which these tensors do not have: all places, or 1."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not isinstance(x, torch._subclasses.FakeTensor):
        return None
    if func is torch.ops.aten.nonzero.default:
        return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)
    if func is torch.ops.aten._local_scalar_dense.default:
        return False if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1
    return None


def stages(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    batch: int,
    context: int,
    lora: int | None,
    checkpointing: bool,
    shared: bool = True,
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the stages of a conversion by name, each as a function that runs two steps of it, as the second one has the
    optimizer's states from its begin."""
    made: dict[str, Any] = {}
    budget = Budget(steps=2)

    def load() -> None:
        made["model"] = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        ids = torch.randint(config.get_text_config().vocab_size, (batch, context))
        made["batches"] = [{"input_ids": ids}]

    def change() -> None:
        model, batches = made["model"], made["batches"]
        made["teacher"] = convert(model, plan(model, batches[0]), batches, shared=shared).teacher

    def tune() -> None:
        if checkpointing:
            made["model"].gradient_checkpointing_enable({"use_reentrant": False})
        fine_tune(*models(), budget, lora=lora)

    def models() -> tuple[Any, Any, Any]:
        return made["model"], made["teacher"], made["batches"]

    yield "load", load
    yield "convert", change
    yield "transfer", lambda: transfer(*models(), budget)
    yield "fine-tune", tune
    yield "report", lambda: scores(*models())


@contextmanager
def _converted_by_data() -> Iterator[None]:
    """Let modules change their dtype inside the block: torch's own way does not know tensors without numbers."""

    def to(module: nn.Module, device: Any = None, dtype: Any = None) -> nn.Module:
        for weight in (*module.parameters(), *module.buffers()):
            if weight.is_floating_point():
                weight.data = weight.data.to(device=device, dtype=dtype)
        return module

    before = nn.Module.to
    nn.Module.to = to
    try:
        yield
    finally:
        nn.Module.to = before


@contextmanager
def _phases(memory: LiveMemory) -> Iterator[None]:
    """Begin a phase at each part of a training step, the first of which only makes the optimizer's states."""
    originals = training._gradients, training.clip_grad_norm_, stages_module.backward
    seen: set[int] = set()

    def gradients(model: nn.Module, *rest: Any) -> float:
        memory.begin(f"{stage(memory)}, forward")
        if (key := hash(stage(memory))) in seen:
            return originals[0](model, *rest)
        seen.add(key)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        return 1.0

    def clip(*args: Any) -> Any:
        memory.begin(f"{stage(memory)}, update")
        return originals[1](*args)

    def backward(*args: Any) -> None:
        memory.begin(f"{stage(memory)}, backward")
        originals[2](*args)

    training._gradients, training.clip_grad_norm_, stages_module.backward = gradients, clip, backward
    try:
        yield
    finally:
        training._gradients, training.clip_grad_norm_, stages_module.backward = originals


def stage(memory: LiveMemory) -> str:
    return memory.phase.partition(",")[0]


def count_phases(config: PreTrainedConfig, **options: Any) -> dict[str, int]:
    """Return the peak of each phase in bytes. A phase is named by its stage and, after a comma, its part of a step."""
    with FakeTensorMode(allow_non_fake_inputs=True), _converted_by_data(), LiveMemory() as memory, _phases(memory):
        for name, run in stages(config, **options):
            memory.begin(name)
            run()
        # tensors go before the modes that count them
        gc.collect()
    return memory.peaks


def count(kind: type[PreTrainedConfig], sizes: Any, *, exact: bool = False, **options: Any) -> dict[str, int]:
    """Return the peak of each stage in bytes, by the stage's name."""
    layers = sizes["num_hidden_layers"]
    if exact or layers <= 3:
        phases = count_phases(kind(**sizes), **options)
    else:
        two, three = (count_phases(kind(**sizes | {"num_hidden_layers": n}), **options) for n in (2, 3))
        phases = {name: three[name] + (layers - 3) * (three[name] - two[name]) for name in three}
    peaks: dict[str, int] = {}
    for name, size in phases.items():
        peaks[name.partition(",")[0]] = max(size, peaks.get(name.partition(",")[0], 0))
    return {name: size for name, size in peaks.items() if name}


def measure(kind: type[PreTrainedConfig], sizes: Any, **options: Any) -> dict[str, int]:
    """Return what a process takes more than at its begin in each stage, in bytes: medians over new processes. Needs
    Linux."""
    # tensors of more bytes than this go back to the system as soon as they are freed
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    found = []
    for _ in range(REPEATS):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(measure_once, kind, sizes, **options).result())
    return {name: int(statistics.median(each[name] for each in found)) for name in found[0]}


def measure_once(kind: type[PreTrainedConfig], sizes: Any, **options: Any) -> dict[str, int]:
    """Return what this process takes more than at its begin in each stage, in bytes."""
    torch.set_num_threads(1)
    # what libraries load at their first use is not the model's
    for _, run in stages(kind(**sizes | WARM_UP), **options | {"batch": 1, "context": 64}):
        run()
    gc.collect()
    forget_peak()
    peaks, before = {}, peak_bytes()
    for name, run in stages(kind(**sizes), **options):
        forget_peak()
        run()
        peaks[name] = int(peak_bytes() - before)
    return peaks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, nargs="+", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--lora", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--exact", action="store_true", help="count all layers, which takes seconds for each")
    parser.add_argument("--measure", action="store_true", help="run it, too, which needs the memory")
    given = vars(parser.parse_args(arguments))
    models, exact, also, layers = (given.pop(name) for name in ("model", "exact", "measure", "layers"))
    given["dtype"] = getattr(torch, given["dtype"])
    for name in models:
        kind, sizes = CONFIGS[name]
        sizes = sizes if layers is None else sizes | {"num_hidden_layers": layers}
        for how in (partial(count, exact=exact), measure) if also else (partial(count, exact=exact),):
            peaks = how(kind, sizes, **given)
            shown = {stage: round(size / 1e9, 2) for stage, size in peaks.items()}
            print(json.dumps({"model": name, "measured": how is measure, "gigabytes": shown}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
