"""One training loop for teachers and controls: a short warm-up, a cosine to zero, one thread, one seed. Teachers take
steps of AdamW; controls orthogonal ones, as conversions do."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from examples.linearize.task import Data, Task, measure
from linattn.console.atomic import atomic_folder
from linattn.console.muon import Muon
from linattn.linearize.stages import hidden_matrices

Report = Callable[[str], None]
WARMUP = 0.05


def fit(
    model: PreTrainedModel,
    data: Data,
    task: Task,
    *,
    steps: int = 10**9,
    seconds: float = math.inf,
    lr: float,
    orthogonal: bool = False,
    report: Report = print,
) -> tuple[float, int]:
    """Train on the model's own loss for so many steps, or until they took so many processor seconds; return both. The
    learning rate rises to `lr` and falls to zero. With `orthogonal`, hidden matrices take steps of `Muon`."""
    hidden = hidden_matrices(model) if orthogonal else set()
    kinds = [
        ({"weight_decay": task.weight_decay, "orthogonal": True}, [p for p in model.parameters() if id(p) in hidden]),
        ({"weight_decay": task.weight_decay}, [p for p in model.parameters() if p.ndim > 1 and id(p) not in hidden]),
        ({"weight_decay": 0.0}, [p for p in model.parameters() if p.ndim < 2]),
    ]
    groups = [{"params": weights, **kind} for kind, weights in kinds if weights]
    optimizer = Muon(groups, lr=lr, betas=(0.9, 0.99), fused=True)
    taken, step, losses = 0.0, 0, []
    model.train()
    while step < steps and taken < seconds:
        started = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(max((step + 0.5) / steps, taken / seconds))
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
    seconds, _ = fit(model, data, task, steps=task.steps, lr=task.lr, report=report)
    report(f"{path.name}: {measure(model, data.held_out())}, {seconds:.0f} s")
    model.config.training_seconds = round(seconds, 1)
    with atomic_folder(path) as partial:
        model.save_pretrained(partial)
    return model
