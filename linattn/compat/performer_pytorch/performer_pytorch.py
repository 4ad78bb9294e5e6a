"""The original's main module: `from performer_pytorch.performer_pytorch import PerformerLM` works here too."""

from linattn.compat.performer_pytorch import *  # noqa: F403
