"""Whisper as an assistant. Its generation cuts the keys and values of the cache into rows, and puts them together again
for its output; a cache of states has none, and passes by."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from linattn.integrations.transformers.state_layer import StateLayer

CACHE = "cache"


def keep_states(kind: Any) -> None:
    """Let the class of a model return caches with our states from its generation. It is Whisper's if it has methods
    that cut outputs into rows."""
    for name, wrapper in (("_postprocess_outputs", _cut), ("_stack_split_outputs", _join)):
        stock = getattr(kind, name, None)
        if stock is not None and not hasattr(stock, "stock"):
            setattr(kind, name, _wrapped(stock, wrapper))


def _wrapped(stock: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def call(self: Any, seek_outputs: Any, *args: Any, **options: Any) -> Any:
        return wrapper(lambda outputs: stock(self, outputs, *args, **options), seek_outputs)

    vars(call)["stock"] = stock
    return call


def _cut(stock: Callable[[Any], Any], outputs: Any) -> Any:
    cache = None if isinstance(outputs, Tensor) else outputs.get(CACHE)
    if not _has_states(cache):
        return stock(outputs)
    sequences, rows = stock(_without_cache(outputs))
    if len(rows) != 1:
        raise ValueError(f"return_dict_in_generate: a cache of states is that of one row, but there are {len(rows)}")
    rows[0][CACHE] = cache
    return sequences, rows


def _join(stock: Callable[[Any], Any], rows: list[dict[str, Any]]) -> Any:
    cache = rows[0].get(CACHE)
    if not _has_states(cache):
        return stock(rows)
    outputs = stock([_without_cache(row) for row in rows])
    outputs[CACHE] = cache
    return outputs


def _without_cache(outputs: Any) -> dict[str, Any]:
    return {name: value for name, value in outputs.items() if name != CACHE}


def _has_states(cache: Any) -> bool:
    return isinstance(cache, EncoderDecoderCache) and any(
        isinstance(layer, StateLayer) for layer in cache.self_attention_cache.layers
    )
