"""Text from a language model: how tokens are drawn, prompts in batches, and drafts that save time."""

from linattn.generation.batches import ContinuousBatch, NewToken, generate_each
from linattn.generation.drafts import Draft, ModelDraft, PromptLookup
from linattn.generation.requests import Request
from linattn.generation.sampling import Sampling
from linattn.generation.streams import generate, stream

__all__ = [
    "ContinuousBatch",
    "Draft",
    "ModelDraft",
    "NewToken",
    "PromptLookup",
    "Request",
    "Sampling",
    "generate",
    "generate_each",
    "stream",
]
