"""Folders that transformers loads, linearized ones first, for `linattn generate`, `serve` and `info`."""

import argparse
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TextIteratorStreamer, logging
from transformers.cache_utils import Cache

from linattn.console.errors import CommandError, explained
from linattn.generation.sampling import GREEDY, Sampling
from linattn.generation.texts import Decoder, text_decoder
from linattn.integrations.transformers import LinattnForCausalLM, byte_tokenizer
from linattn.integrations.transformers.state_layer import cache_bytes
from linattn.integrations.transformers.token_model import PretrainedTokenModel
from linattn.linearize import linearized_layers, load_linearized
from linattn.linearize.attention import own_attention
from linattn.linearize.command.result import positions
from linattn.linearize.command.text import ModelEncoder, load_tokenizer
from linattn.linearize.folder import FIELD
from linattn.models.token_model import TokenModel

MEASURED = 256
"""The number of tokens after which the cache of a model is measured, and again after twice as many."""


def load(folder: Path) -> PreTrainedModel:
    """Load a causal language model, in evaluation. Code in the folder does not run."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # a damaged file may raise any exception
    with explained(f"{folder} cannot be loaded", Exception):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, FIELD, None) is not None:
            return load_linearized(folder).eval()
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()


def load_for_requests(folder: Path, arguments: argparse.Namespace) -> tuple[TokenModel, "PretrainedVocabulary"]:
    """Return the model and the vocabulary for texts that are generated together."""
    model, vocabulary = _load(folder, arguments)
    if isinstance(model, LinattnForCausalLM):
        return model.model, vocabulary
    with explained(f"{folder} has no state to go on from", ValueError):
        return PretrainedTokenModel(model), vocabulary


def _load(folder: Path, arguments: argparse.Namespace) -> tuple[Any, "PretrainedVocabulary"]:
    """Return the model, on the GPU unless --cpu forbids it, and its vocabulary."""
    model: Any = load(folder)
    vocabulary = PretrainedVocabulary(folder, model)
    return model.to("cuda") if torch.cuda.is_available() and not arguments.cpu else model, vocabulary


@final
class PretrainedVocabulary:
    """The tokenizer of a folder; bytes, if it has none."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        own: Any = load_tokenizer(str(folder), model.config)
        self.folder, self.has_tokenizer = folder, own is not None
        self.tokenizer: Any = own if self.has_tokenizer else byte_tokenizer()
        size = model.config.get_text_config().vocab_size
        encoder = ModelEncoder(own, size)
        self.begin, self.encode = encoder.begin, encoder.encode
        ends: Any = model.generation_config and model.generation_config.eos_token_id
        # a configuration may name the end of a larger vocabulary, which transformers never meets
        self.stop_tokens = tuple(end for end in (ends if isinstance(ends, list) else [ends]) if end in range(size))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text, after those that the tokenizer puts before it. Raise ValueError if there is no
        token."""
        tokens = self.tokenizer(text)["input_ids"] if self.has_tokenizer else list(text.encode())
        if not tokens and self.has_tokenizer and (begin := self.tokenizer.bos_token_id) is not None:
            tokens = [begin]
        if not tokens:
            raise ValueError(f"{self.folder} has no token that begins a text: give a prompt")
        return tokens

    def chat(self, messages: list[Any]) -> list[int]:
        """Return the tokens of a conversation up to the next answer, as the chat template writes them."""
        if not self.has_chat_template:
            raise CommandError(f"the tokenizer of {self.folder} has no chat template")
        with explained(f"the chat template of {self.folder} cannot be used", Exception):
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]

    def decoder(self) -> Decoder:
        return text_decoder(self.tokenizer.backend_tokenizer, skip_special_tokens=True)


def generated(
    folder: Path, prompt: str, arguments: argparse.Namespace, sampling: Sampling, times: list[float]
) -> Iterator[str]:
    """Yield the prompt, then the new text in pieces. With `arguments.chat`, which takes the prompt as a user's message,
    the first is empty. Append the times at which the model began and tokens came to `times`."""
    model, vocabulary = _load(folder, arguments)
    message = [{"role": "user", "content": prompt}]
    tokens = torch.tensor([vocabulary.chat(message) if arguments.chat else vocabulary.prompt(prompt)])
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    streamer = _Streamer(vocabulary.tokenizer, times, skip_prompt=arguments.chat)
    options = {
        "attention_mask": torch.ones_like(tokens, device=model.device),
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": sampling.temperature != GREEDY.temperature,
        "temperature": sampling.temperature or None,
        # transformers' own default is 50
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        **({"stop_strings": [arguments.stop], "tokenizer": vocabulary.tokenizer} if arguments.stop else {}),
        "streamer": streamer,
    }
    errors: list[Exception] = []

    def run() -> None:
        try:
            model.generate(tokens.to(model.device), **options)
        except Exception as error:
            errors.append(error)
            streamer.end()

    # the streamer's text has the prompt, too, as what a token means may depend on those before it
    shown = "" if arguments.chat else vocabulary.tokenizer.decode(tokens[0], skip_special_tokens=True)
    yield shown
    left = len(shown)
    times.append(time.perf_counter())
    if not arguments.max_new_tokens:
        # transformers refuses it
        return
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for piece in streamer:
        yield piece[left:]
        left = max(0, left - len(piece))
    thread.join()
    # the last token is not read
    length, limit = tokens.shape[1] + arguments.max_new_tokens - 1, positions(model.config)
    for error in errors:
        if isinstance(error, IndexError) and length > limit:
            message = f"the model's positions end at {limit}, but prompt and new tokens need {length}"
            raise ValueError(message) from error
        raise error


class _Streamer(TextIteratorStreamer):
    """Yields text as it is generated, and appends the time of each token to `times`."""

    def __init__(self, tokenizer: Any, times: list[float], *, skip_prompt: bool):
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self.times, self.prompt_came = times, False

    def put(self, value: Tensor) -> None:
        if self.prompt_came:
            self.times.append(time.perf_counter())
        self.prompt_came = True
        super().put(value)


def describe(folder: Path) -> dict[str, Any]:
    """Return the facts that `linattn info` prints: the class, the layers, and the bytes of the cache per sequence."""
    model = load(folder)
    n = min(MEASURED, positions(model.config) // 2)
    with explained(f"{folder} cannot be measured", ValueError, RuntimeError, TypeError):
        first, second = (_cache_bytes(model, tokens) for tokens in (n, 2 * n))
    return {
        "folder": str(folder),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": _layers(model),
        "state_bytes": first,
        "state_tokens": n,
        "state_bytes_per_further_token": (second - first) / n,
    }


def _layers(model: PreTrainedModel) -> list[str]:
    """Return the kind of attention of each layer, in the words of the configuration's `layer_types` if it has them."""
    config: Any = model.config.get_text_config(decoder=True)
    if isinstance(model, LinattnForCausalLM):
        return list(config.to_language_model().layers)
    linear = {own.index: own.method for own in (own_attention(x).spec for x in linearized_layers(model).values())}
    kinds = (
        getattr(config, "layer_types", None) or ["softmax" if linear else config.model_type] * config.num_hidden_layers
    )
    return [str(linear.get(index, kind)) for index, kind in enumerate(kinds)]


def _cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    with torch.inference_mode():
        output = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True)
    cache = next((value for value in output.values() if isinstance(value, Cache)), None)
    if cache is None:
        raise ValueError(f"{type(model).__name__} returns no cache")
    return cache_bytes(cache)
