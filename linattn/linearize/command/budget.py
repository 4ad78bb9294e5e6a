"""A word on budgets that are too small for a model, before the training begins."""

from tqdm.auto import tqdm

WEIGHTS_PER_TOKEN = 20
"""A conversion needs about one token for so many weights that train. Published ones read 40 million (8 billion weights
with LoRA, https://arxiv.org/abs/2410.10254) to 500 million tokens (7 billion, https://arxiv.org/abs/2505.03005)."""
LEAST_STEPS = 100
"""Updates of the weights that every conversion needs."""
STEP = 2.0
"""The time of a training step, as a multiple of one forward pass of teacher and model."""


def budget_note(weights: int, tokens: int, steps: int | None, minutes: float, seconds: float) -> str | None:
    """Return what to say of a budget of `steps`, or of `minutes` without them: None if it is large enough.

    So many `weights` train, each step reads so many `tokens` and takes so many `seconds`."""
    needed = max(LEAST_STEPS * tokens, weights // WEIGHTS_PER_TOKEN)
    read = tokens * (60 * minutes / seconds if steps is None else steps)
    if read >= needed:
        return None
    time = tqdm.format_interval(needed / tokens * seconds)
    return (
        f"the budget is small for {weights:,} weights: it reads about {read:,.0f} tokens, but such a model needs about "
        f"{needed:,}, and these take about {time} (hours:minutes:seconds) at the speed of this machine"
    )
