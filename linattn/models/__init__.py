"""Whole models: their configuration and storage."""

from linattn.models.config import LanguageModelConfig
from linattn.models.encoder_decoder import EncoderDecoder
from linattn.models.language_model import LanguageModel
from linattn.models.loss import next_token_loss
from linattn.models.presets import PRESETS, Preset
from linattn.models.token_model import SequenceModel, TokenModelState

__all__ = [
    "PRESETS",
    "EncoderDecoder",
    "LanguageModel",
    "LanguageModelConfig",
    "Preset",
    "SequenceModel",
    "TokenModelState",
    "next_token_loss",
]
