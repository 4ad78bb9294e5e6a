"""A Whisper that writes down spoken words, which are made here: two vowels each, so that the order of sounds counts.

A voice has a pitch and a size of its own; durations, pauses and noise are random. The features are Whisper's own."""

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from examples.linearize.task import Batch, Task, chunks

# the two lowest resonances of five vowels, in Hz
VOWELS = ((300, 2300), (400, 2000), (750, 1200), (450, 850), (320, 800))
WORDS = [(first, second) for first in range(5) for second in range(5) if first != second]
RATE, SECONDS, MELS = 16_000, 1, 32
SHORTEST, LONGEST, BATCH = 1, 3, 32
TRAIN, TEST = 2_000, 320
PADDING, START, END, FIRST = 0, 1, 2, 3
EXTRACT = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)


class Speech:
    """Utterances of 1 to 3 words: 2,000 in random order, and 320 others that are held out."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng([seed, 8])
        self.training = generate(np.random.default_rng([seed, 9]), TRAIN)
        self.test = generate(np.random.default_rng([seed, 10]), TEST)

    def batch(self) -> Batch:
        rows = torch.from_numpy(self.random.integers(TRAIN, size=BATCH))
        return {name: tensor[rows] for name, tensor in self.training.items()}

    def held_out(self) -> list[Batch]:
        return chunks(self.test)


def generate(random: np.random.Generator, count: int) -> Batch:
    """Return `input_features` of random utterances, and `labels`: their words and an end."""
    labels = torch.full((count, LONGEST + 1), -100)
    waves = []
    for row in range(count):
        words = random.integers(len(WORDS), size=random.integers(SHORTEST, LONGEST + 1))
        waves.append(spoken([WORDS[word] for word in words], random))
        labels[row, : len(words)] = torch.from_numpy(words) + FIRST
        labels[row, len(words)] = END
    features = EXTRACT(waves, sampling_rate=RATE, return_tensors="pt").input_features
    return {"input_features": features, "labels": labels}


def spoken(words: list[tuple[int, int]], random: np.random.Generator) -> np.ndarray:
    """Return the samples of a voice that speaks these words, with noise."""
    pitch, size = random.uniform(90, 220), random.uniform(0.9, 1.1)
    parts = [np.zeros(random.integers(200, 1_200))]
    for word in words:
        parts += [vowel(VOWELS[sound], pitch, size, random.integers(1_000, 1_600)) for sound in word]
        parts.append(np.zeros(random.integers(300, 1_000)))
    wave = np.concatenate(parts)
    return (wave + random.normal(scale=0.02, size=len(wave))).astype(np.float32)


def vowel(resonances: tuple[int, int], pitch: float, size: float, samples: int) -> np.ndarray:
    """Return harmonics of the `pitch`, loudest at the `resonances` of a voice of this `size`."""
    harmonics = pitch * np.arange(1, int(4_000 / pitch))
    loud = sum(np.exp(-(((harmonics - size * resonance) / 150) ** 2)) for resonance in resonances)
    # Σ aₖ sin(kφ) is the imaginary part of a polynomial
    circle = np.exp(2j * np.pi * pitch / RATE * np.arange(samples))
    return np.hanning(samples) * np.polyval([*loud[::-1], 0], circle).imag / 4


def model() -> WhisperForConditionalGeneration:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=FIRST + len(WORDS),
            num_mel_bins=MELS,
            d_model=64,
            max_source_positions=50 * SECONDS,
            max_target_positions=8,
            pad_token_id=PADDING,
            bos_token_id=START,
            eos_token_id=END,
            decoder_start_token_id=START,
            begin_suppress_tokens=None,
            init_std=0.1,
            **sizes,
        )
    )


SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 128}
TASK = Task(name="speech", steps=600, lr=2e-3, window=8, metric="accuracy", model=model, data=Speech)
