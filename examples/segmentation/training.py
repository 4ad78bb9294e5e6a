"""One run: train, measure, and keep the predictions that are to be drawn."""

import math
import time
from typing import Any

import torch
import torch.nn.functional as F

from examples.segmentation.model import Segmenter
from examples.segmentation.task import Task, mean_iou

LEARNING_RATE = 3e-3


def train(task: Task, mixer: str, *, steps: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Everything from one seed, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    steps = task.steps if steps is None else steps
    model, generator = Segmenter(mixer), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step / steps))
    started = time.process_time()
    for _ in range(steps):
        images, masks = task.draw(generator)
        loss = F.binary_cross_entropy_with_logits(model(images), masks.float())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - started
    predicted = torch.cat([_predict(model, part) for part in task.test.images.split(64)])
    return {
        "task": task.name,
        "mixer": mixer,
        "seed": seed,
        "steps": steps,
        "mean IoU": round(mean_iou(predicted, task.test.masks), 4),
        "CPU s": round(seconds, 1),
        "weights": sum(p.numel() for p in model.parameters()),
        "predicted": predicted,
    }


def _share(done: float) -> float:
    """Return the part of the learning rate: up over the first fortieth, level, down by a cosine in the last third."""
    return min((done + 0.002) / 0.025, 1) * 0.5 * (1 + math.cos(math.pi * max(0, 3 * done - 2)))


@torch.no_grad()
def _predict(model: Segmenter, images: torch.Tensor) -> torch.Tensor:
    return model.eval()(images) > 0
