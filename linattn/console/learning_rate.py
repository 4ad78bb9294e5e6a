"""The learning rate over a training, for the commands that train."""

import math


def learning_rate_factor(progress: float, warmup: float) -> float:
    """Rise linearly during the `warmup`, then fall along half a cosine. Both are shares of the training."""
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
