"""Whole models: their configuration, generation and storage."""

from linattn.models.config import LanguageModelConfig
from linattn.models.drafts import Draft, ModelDraft, PromptLookup
from linattn.models.encoder_decoder import EncoderDecoder
from linattn.models.generation import Sampling, generate, stream
from linattn.models.language_model import LanguageModel
from linattn.models.loss import next_token_loss
from linattn.models.presets import PRESETS, Preset
from linattn.models.token_model import SequenceModel, TokenModelState

__all__ = [
    "PRESETS",
    "Draft",
    "EncoderDecoder",
    "LanguageModel",
    "LanguageModelConfig",
    "ModelDraft",
    "Preset",
    "PromptLookup",
    "Sampling",
    "SequenceModel",
    "TokenModelState",
    "generate",
    "next_token_loss",
    "stream",
]
