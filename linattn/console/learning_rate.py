"""The learning rate over a training, for the commands that train."""

import math


def learning_rate_factor(progress: float, warmup: float) -> float:
    """Return a factor that rises linearly during `warmup`, then falls along half a cosine; both are shares of a run."""
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
