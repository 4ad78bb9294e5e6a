"""Whole models: their configuration, generation and storage."""

from linattn.models.config import LanguageModelConfig
from linattn.models.generation import Sampling, generate, stream
from linattn.models.language_model import Block, LanguageModel, LanguageModelState

__all__ = [
    "Block",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "Sampling",
    "generate",
    "stream",
]
