"""Caches with our states as holders of states: `linattn.states` selects, joins, compresses and saves them."""

import copy
import json
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from linattn.integrations.transformers.own_model.cache import LinattnCache
from linattn.integrations.transformers.own_model.model import LinattnPreTrainedModel
from linattn.integrations.transformers.state_layer import StateLayer
from linattn.ops.nested import first_tensor
from linattn.states.holders import held_state, hold, options_of

# the fields of a configuration that no state depends on; the weights say their dtype
IGNORED = {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "transformers_version", "use_cache"}


class CacheState(NamedTuple):
    """The states of each layer of a cache, and the number of tokens per row, including padding."""

    layers: tuple[tuple[Any, ...], ...]
    seen: Int[Tensor, " b"]


def register() -> None:
    """Register transformers' caches and models with `linattn.states`."""
    held_state.register(Cache, _state)
    hold.register(CacheState, _cache)
    options_of.register(PreTrainedModel, _options)


def _state(cache: Cache) -> CacheState:
    if isinstance(cache, EncoderDecoderCache):
        raise ValueError("an EncoderDecoderCache is two caches, which belong together: functions for states take one")
    layers = tuple(_layer_states(layer) for layer in cache.layers)
    example = first_tensor(layers)
    if example is None:
        raise ValueError(f"this {type(cache).__name__} has no state yet: no token was read")
    return CacheState(layers, torch.full((len(example),), cache.get_seq_length(), device=example.device))


def _layer_states(layer: Any) -> tuple[Any, ...]:
    if not isinstance(layer, StateLayer):
        raise ValueError(f"the layers of a cache must hold states of linattn, but one is a {type(layer).__name__}")
    return tuple(history.state for history in layer.histories)


def _cache(state: CacheState, example: Cache | PreTrainedModel) -> Cache:
    """Return a new cache with the state, none of whose tokens can be taken back."""
    if isinstance(example, (LinattnCache, LinattnPreTrainedModel)):
        cache = LinattnCache()
    elif isinstance(example, PreTrainedModel):
        cache = DynamicCache(config=example.config.get_text_config(decoder=True))
    else:
        cache = copy.copy(example)
        cache.layers = [type(layer)() for layer in example.layers]
    layers: list[Any] = cache.layers
    for layer, states in zip(layers, state.layers, strict=True):
        for history, each in zip(layer.histories, states, strict=True):
            history.state = each
        layer.seen = int(state.seen.max())
    return cache


def _options(model: PreTrainedModel) -> dict[str, Any] | None:
    if isinstance(model, LinattnPreTrainedModel):
        return options_of(model.model)
    config = json.loads(model.config.to_json_string(use_diff=False), object_pairs_hook=_effective)
    return {"attn_implementation": model.config._attn_implementation} | config


def _effective(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if name not in IGNORED}
