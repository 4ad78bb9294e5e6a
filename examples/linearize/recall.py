"""Multi-query associative recall, as in examples/learning: which value came with this key? A short window knows few.

The teacher is a small LFM2: a gated convolution of width 3, which tells each value about the key before it, and one
attention of one head."""

import numpy as np
import torch
from torch.nn import functional as F
from transformers import Lfm2Config, Lfm2ForCausalLM

from examples.learning import recall
from examples.linearize.task import Batch, Task, chunks

TRAIN, TEST, BATCH = 20_000, 500, 64


class Recall:
    """20,000 sequences in random order, and 500 others that are held out."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng([seed, 2])
        self.training = _labelled(np.random.default_rng([seed, 3]), TRAIN)
        self.test = _labelled(np.random.default_rng([seed, 4]), TEST)

    def batch(self) -> Batch:
        rows = torch.from_numpy(self.random.integers(TRAIN, size=BATCH))
        return {name: tensor[rows] for name, tensor in self.training.items()}

    def held_out(self) -> list[Batch]:
        return chunks(self.test)


def _labelled(random: np.random.Generator, count: int) -> Batch:
    """Move each answer to the next place, because transformers' models predict the label that follows."""
    tokens, answers = recall.generate(random, count)
    tokens = F.pad(tokens, (0, 1))
    return {"input_ids": tokens, "labels": F.pad(answers, (1, 0), value=-100)}


def model() -> Lfm2ForCausalLM:
    return Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=recall.VOCABULARY,
            hidden_size=64,
            intermediate_size=64,
            block_auto_adjust_ff_dim=False,
            num_hidden_layers=2,
            layer_types=["conv", "full_attention"],
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=16_384,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


# with weight decay, some of the values are never told apart
TASK = Task(name="recall", steps=700, lr=3e-3, weight_decay=0.0, window=32, metric="accuracy", model=model, data=Recall)
