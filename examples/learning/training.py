"""The training loop of all the examples: one thread, one optimizer, everything from one seed."""

import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from examples.learning.task import Data, Task, Training, answers
from examples.learning.variants import VARIANTS
from linattn import LanguageModel
from linattn.console.muon import Muon, language_model_groups

Report = Callable[[dict[str, float]], None]


def learning_rate(step: int, training: Training, spent: float = 0.0) -> float:
    """Return that of the step after `step` others, which took `spent` seconds."""
    if step < training.warmup:
        return training.lr * (step + 1) / training.warmup
    if training.drop is not None:
        return training.lr if step < training.drop else 0.1 * training.lr
    done = (step - training.warmup) / max(1, training.steps - training.warmup)
    if training.seconds is not None:
        done = max(done, min(1.0, spent / training.seconds))
    return training.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: LanguageModel, training: Training) -> torch.optim.AdamW:
    """Only matrices decay, not norms and biases, as in nanoGPT."""
    if training.optimizer == "muon":
        groups = language_model_groups(model, model.get_stack())
        options: dict[str, Any] = {"lr": training.lr, "betas": training.betas, "weight_decay": training.weight_decay}
        return Muon(groups, fused=True, **options)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, fused=True)


def train(
    task: Task,
    method: str,
    seed: int,
    *,
    variant: str | None = None,
    data: Path | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """One run, and all there is to say about it."""
    torch.set_num_threads(1)
    source, training = task.prepare(seed, data), task.training
    torch.manual_seed(seed)
    model = VARIANTS[variant].model(task.methods[method]) if variant else LanguageModel(task.methods[method])
    started = time.perf_counter(), time.process_time()
    curve = fit(model, source, training, report)
    wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    return {
        "task": task.name,
        "method": method,
        "seed": seed,
        **({"variant": variant} if variant else {}),
        "steps": training.steps,
        **settings(training),
        task.metric: curve[-1][task.metric],
        "curve": curve,
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(wall, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def settings(training: Training) -> dict[str, Any]:
    """Return what is chosen for each method, where methods are compared at their best."""
    return {"optimizer": training.optimizer, "lr": training.lr, "warmup": training.warmup}


def fit(model: LanguageModel, source: Data, training: Training, report: Report) -> list[dict[str, float]]:
    """Train to the last step, until the time is over or the task is solved; return the measurements on the way."""
    optimizer, curve, losses, spent = make_optimizer(model, training), [], [], 0.0
    model.train()
    for step in range(1, training.steps + 1):
        started = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, training, spent)
        losses.append(_step(model, source.batch(), optimizer, training.clip))
        spent += time.process_time() - started
        is_last = step == training.steps or (training.seconds is not None and spent >= training.seconds)
        if step % training.every and not is_last:
            continue
        measured = {"step": step, "seconds": spent, "train_loss": sum(losses) / len(losses), **source.measure(model)}
        curve.append({name: round(value, 6) for name, value in measured.items()})
        losses.clear()
        report(curve[-1])
        if is_last or measured["accuracy"] >= training.solved:
            break
    return curve


def _step(
    model: LanguageModel, batch: tuple[torch.Tensor, torch.Tensor], optimizer: torch.optim.Optimizer, clip: float
) -> float:
    logits, wanted = answers(model, *batch)
    loss = F.cross_entropy(logits, wanted)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()
