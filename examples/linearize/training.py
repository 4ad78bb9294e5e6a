"""One training loop for teachers and controls: AdamW, a short warm-up, a cosine to zero, one thread, one seed."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from examples.linearize.task import Data, Task, measure

Report = Callable[[str], None]
WARMUP = 0.05


def fit(
    model: PreTrainedModel,
    data: Data,
    task: Task,
    *,
    steps: int = 10**9,
    seconds: float = math.inf,
    report: Report = print,
) -> tuple[float, int]:
    """Train on the model's own loss for so many steps, or until they took so many processor seconds; return both."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": task.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=task.lr, betas=(0.9, 0.99), fused=True)
    taken, step, losses = 0.0, 0, []
    model.train()
    while step < steps and taken < seconds:
        started = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = task.lr * schedule(max((step + 0.5) / steps, taken / seconds))
        loss = model(**data.batch()).loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        taken, step = taken + time.process_time() - started, step + 1
        losses.append(loss.item())
        if not step % 100:
            report(f"step {step:,}: loss {sum(losses) / len(losses):.4f}, {taken:.0f} s")
            losses.clear()
    return taken, step


def schedule(progress: float) -> float:
    """Rise linearly, then fall along half a cosine."""
    if progress < WARMUP:
        return progress / WARMUP
    return (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))) / 2


def teacher(task: Task, seed: int, folder: Path, report: Report = print) -> PreTrainedModel:
    """Return the task's softmax model of this seed, from `folder` if it has been trained before."""
    torch.manual_seed(seed)
    model, path = task.model(), folder / f"{task.name}-{seed}"
    if path.exists():
        return type(model).from_pretrained(path)
    data = task.data(seed)
    seconds, _ = fit(model, data, task, steps=task.steps, report=report)
    report(f"{path.name}: {measure(model, data.held_out())}, {seconds:.0f} s")
    model.config.training_seconds = round(seconds, 1)
    model.save_pretrained(path)
    return model
