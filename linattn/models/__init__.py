"""Whole models: their configuration, generation and storage."""

from linattn.models.config import LanguageModelConfig
from linattn.models.encoder_decoder import EncoderDecoder
from linattn.models.generation import Sampling, generate, stream
from linattn.models.language_model import Block, LanguageModel, LanguageModelState
from linattn.models.loss import next_token_loss
from linattn.models.sequence_model import SequenceModel, SequenceModelState, TiedHead

__all__ = [
    "Block",
    "EncoderDecoder",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "Sampling",
    "SequenceModel",
    "SequenceModelState",
    "TiedHead",
    "generate",
    "next_token_loss",
    "stream",
]
