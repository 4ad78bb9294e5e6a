"""The outputs of a model, and what bfloat16 changes in them."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from linattn.integrations.transformers.stock_attention.cache import tensor_of
from linattn.integrations.transformers.stock_attention.hooks import is_ours, watched

from .inputs import Subject, inputs

MANY = 70
"""The number of tokens with which rounding to bfloat16 is compared."""
Pairs = list[tuple[Tensor, Tensor]]
"""Values of ours, and what they must equal."""


def output(model: Any, **given: Any) -> Tensor:
    """Return the first tensor of numbers that the model returns, without a cache."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    # masks of masked autoencoders are random
    torch.manual_seed(0)
    result = model(**given)
    names = ("logits", "last_hidden_state", "logits_per_image", "image_embeds", "text_embeds")
    found = [getattr(result, name, None) for name in names]
    found += list(result.values()) if hasattr(result, "values") else list(result)
    return next(x for x in found if isinstance(x, Tensor) and x.is_floating_point())


def _many_tokens(subject: Subject) -> dict[str, Tensor]:
    # a window of ModernBERT, half to each side, which our methods cannot forget
    window = getattr(subject.model.config.get_text_config(), "local_attention", 2 * MANY)
    return inputs(subject, min(MANY, window // 2))


def bfloat16_subject(subject: Subject) -> Subject:
    """Return a copy in bfloat16, with the frequencies of rotations in float32, as in a model loaded in bfloat16."""
    model = copy.deepcopy(subject.model).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            buffer.data = subject.model.get_buffer(name).float()
    return subject._replace(model=model)


def bfloat16_calls(subject: Subject) -> Pairs:
    """Compare each call of our attention in bfloat16 with the same call in float64."""
    subject = bfloat16_subject(subject)
    name, pairs = subject.model.config._attn_implementation, []
    if not is_ours(name):
        output(subject.model, **_many_tokens(subject))
        return []
    function = AttentionInterface._global_mapping[name]

    def compare(module: Any, *tensors: Any, **options: Any) -> None:
        # the cache is left as it is
        tensors = tuple(map(tensor_of, tensors))
        pairs.append((function(module, *tensors, **options)[0].double(), _exact(function, module, tensors, options)))

    with watched(name, compare):
        output(subject.model, **_many_tokens(subject))
    return pairs


def _exact(function: Callable[..., Any], module: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    plain = map(tensor_of, tensors)
    exact = [x.double() if x is not None and x.dtype == torch.bfloat16 else x for x in plain]
    return function(module, *exact, **options)[0]


@contextmanager
def exact_attention(name: str) -> Iterator[None]:
    """Compute our attention in float64 inside the block, also in models in bfloat16."""
    function = AttentionInterface._global_mapping[name]

    def exact(module: Any, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
        return _exact(function, module, tensors, options).to(tensor_of(tensors[0]).dtype), None

    AttentionInterface.register(name, exact)
    try:
        yield
    finally:
        AttentionInterface.register(name, function)


def bfloat16_change(subject: Subject) -> float:
    """Return by how much bfloat16 changes the outputs: the norm of the difference, as a share of that in float64."""
    subjects = (bfloat16_subject(subject), subject)
    y, expected = (output(each.model, **_many_tokens(each)).double() for each in subjects)
    return float(((y - expected).norm() / expected.norm()).nan_to_num(torch.inf))
