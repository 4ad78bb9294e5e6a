"""A BERT that classifies: the question after the first token names a key, and the class is that key's value.

Each token after the question is a pair of key and value, and no key comes twice, so uniform attention cannot know."""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from examples.linearize.task import Batch, NewRows, Task

KEYS, CLASSES = 16, 4
PADDING, FIRST, QUESTIONS = 0, 1, 2
PAIRS = QUESTIONS + KEYS
SHORTEST, LONGEST, BATCH, TEST = 8, 16, 64, 1_000


def generate(random: np.random.Generator, count: int) -> Batch:
    """Return `input_ids`, `attention_mask` and `labels` of random sequences of 8 to 16 pairs, padded on the right."""
    keys = random.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)[:, :LONGEST]
    values = random.integers(CLASSES, size=keys.shape)
    lengths = random.integers(SHORTEST, LONGEST + 1, size=count)
    row, asked = np.arange(count), random.integers(lengths)
    present = np.arange(LONGEST) < lengths[:, None]
    pairs = np.where(present, PAIRS + keys * CLASSES + values, PADDING)
    first = np.stack([np.full(count, FIRST), QUESTIONS + keys[row, asked]], axis=1)
    return {
        "input_ids": _tensor(np.concatenate([first, pairs], axis=1)),
        "attention_mask": _tensor(np.concatenate([np.ones_like(first), present], axis=1)),
        "labels": _tensor(values[row, asked]),
    }


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def model() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=PAIRS + KEYS * CLASSES,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LONGEST + 2,
            num_labels=CLASSES,  # pyright: ignore[reportCallIssue]
            pad_token_id=PADDING,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,
        )
    )


TASK = Task(
    name="encoder",
    steps=600,
    lr=2e-3,
    window=2,
    metric="accuracy",
    model=model,
    data=partial(NewRows, generate, BATCH, TEST),
)
