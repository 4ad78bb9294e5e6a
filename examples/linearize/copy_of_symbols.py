"""Copying: 24 of 64 symbols, between 16 to 48 others and a mark, must be written again. A window cannot know them."""

from functools import partial

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.linearize.task import Batch, NewRows, Task
from linattn.models.loss import NO_LABEL

SYMBOLS, COPIED, SHORTEST, LONGEST, BATCH, TEST = 64, 24, 16, 48, 32, 256
BEGIN, AGAIN, PADDING = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2
LENGTH = LONGEST + 2 * COPIED + 2


def generate(random: np.random.Generator, count: int) -> Batch:
    """Return rows of other symbols, BEGIN, the symbols, AGAIN, and the same symbols, which are the labels."""
    ids = np.full((count, LENGTH), PADDING)
    labels = np.full((count, LENGTH), NO_LABEL)
    for row, others in enumerate(random.integers(SHORTEST, LONGEST + 1, size=count)):
        symbols = random.integers(SYMBOLS, size=COPIED)
        tokens = np.concatenate([random.integers(SYMBOLS, size=others), [BEGIN], symbols, [AGAIN], symbols])
        ids[row, : len(tokens)] = tokens
        labels[row, len(tokens) - COPIED : len(tokens)] = symbols
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SYMBOLS + 3,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16_384,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


TASK = Task(
    name="copying",
    steps=1_400,
    lr=3e-3,
    weight_decay=0.0,
    window=16,
    metric="accuracy",
    model=model,
    data=partial(NewRows, generate, BATCH, TEST),
)
