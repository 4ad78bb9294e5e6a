"""Text from a language model: how tokens are drawn, prompts in batches, and drafts that save time."""

from linattn.generation.drafts import Draft, ModelDraft, PromptLookup
from linattn.generation.sampling import Sampling
from linattn.generation.streams import generate, stream

__all__ = ["Draft", "ModelDraft", "PromptLookup", "Sampling", "generate", "stream"]
