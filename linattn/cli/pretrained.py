"""Folders that transformers loads, linearized ones first, for `linattn generate` and `linattn info`."""

import argparse
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TextIteratorStreamer, logging
from transformers.cache_utils import Cache

from linattn.console.errors import CommandError, explained
from linattn.generation.sampling import GREEDY, Sampling
from linattn.integrations.transformers import LinattnForCausalLM, byte_tokenizer
from linattn.integrations.transformers.state_layer import StateLayer
from linattn.linearize import linearized_layers, load_linearized
from linattn.linearize.attention import own_attention
from linattn.linearize.command.run import positions
from linattn.linearize.command.text import load_tokenizer
from linattn.linearize.folder import FIELD
from linattn.states import num_bytes

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


def generated(
    folder: Path, prompt: str, arguments: argparse.Namespace, sampling: Sampling, times: list[float]
) -> Iterator[str]:
    """Yield the prompt and the new text, or the new text only with `arguments.chat`, which takes the prompt as a user's
    message. Append the times at which the model began and tokens came to `times`."""
    model: Any = load(folder)
    tokenizer = load_tokenizer(str(folder), model.config)
    tokens = _tokens(folder, tokenizer, prompt, chat=arguments.chat)
    tokenizer = tokenizer or byte_tokenizer()
    if torch.cuda.is_available() and not arguments.cpu:
        model = model.to("cuda")
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    streamer = _Streamer(tokenizer, times, skip_prompt=arguments.chat)
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
        **({"stop_strings": [arguments.stop], "tokenizer": tokenizer} if arguments.stop else {}),
        "streamer": streamer,
    }
    errors: list[Exception] = []

    def run() -> None:
        try:
            model.generate(tokens.to(model.device), **options)
        except Exception as error:
            errors.append(error)
            streamer.end()

    times.append(time.perf_counter())
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield from streamer
    thread.join()
    if errors:
        raise errors[0]


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


def _tokens(folder: Path, tokenizer: Any, prompt: str, *, chat: bool) -> Tensor:
    """Return the prompt as a row of tokens: bytes, if the folder has no tokenizer."""
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise CommandError(f"the tokenizer of {folder} has no chat template: leave --chat out")
        message, options = [{"role": "user", "content": prompt}], {"return_tensors": "pt", "return_dict": True}
        with explained(f"the chat template of {folder} cannot be used", Exception):
            return tokenizer.apply_chat_template(message, add_generation_prompt=True, **options)["input_ids"]
    tokens = list(prompt.encode()) if tokenizer is None else tokenizer(prompt)["input_ids"]
    if not tokens and (begin := getattr(tokenizer, "bos_token_id", None)) is not None:
        tokens = [begin]
    if not tokens:
        raise CommandError(f"{folder} has no token that begins a text: give a --prompt")
    return torch.tensor([tokens])


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
        attention = config.to_language_model().attention
        return [attention] * config.num_hidden_layers if isinstance(attention, str) else list(attention)
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
    return sum(
        num_bytes(tuple(history.state for history in layer.histories))
        if isinstance(layer, StateLayer)
        else sum(x.nbytes for x in _pytree.tree_leaves(vars(layer)) if isinstance(x, Tensor))
        for layer in cache.layers
    )
