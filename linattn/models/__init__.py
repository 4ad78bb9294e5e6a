"""Whole models: their configuration, generation and storage."""

from linattn.models.block import Block
from linattn.models.config import LanguageModelConfig
from linattn.models.encoder_decoder import EncoderDecoder
from linattn.models.generation import Sampling, generate, stream
from linattn.models.language_model import LanguageModel
from linattn.models.loss import next_token_loss
from linattn.models.sequence_model import SequenceModel
from linattn.models.token_model import TokenModel, TokenModelState

__all__ = [
    "Block",
    "EncoderDecoder",
    "LanguageModel",
    "LanguageModelConfig",
    "Sampling",
    "SequenceModel",
    "TokenModel",
    "TokenModelState",
    "generate",
    "next_token_loss",
    "stream",
]
