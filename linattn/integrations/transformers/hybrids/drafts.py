"""Assisted decoding of models whose cache is their argument `cache_params`, such as Mamba-2. transformers looks for the
cache that is to be cropped under the name `past_key_values`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

OWN, COMMON = "cache_params", "past_key_values"
NAMES = {
    "generate": (COMMON, OWN),
    "_assisted_decoding": (OWN, COMMON),
    "prepare_inputs_for_generation": (COMMON, OWN),
}
"""Methods that get the cache under the first name, and need it under the second."""


def rename_cache(model: nn.Module) -> RemovableHandle:
    """Let assisted decoding find the cache of the model in its arguments and outputs. Other models of its class stay as
    they are."""
    kind: Any = type(model)
    for name, (source, target) in NAMES.items():
        if not hasattr(stock := getattr(kind, name), "stock"):
            setattr(kind, name, _renamed(stock, source, target))
    return model.register_forward_hook(_add_common_name)


def _renamed(stock: Callable[..., Any], source: str, target: str) -> Callable[..., Any]:
    """Return a method that passes its argument `source` on as `target`, for models that are not stateful."""

    @wraps(stock)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(options.get("generation_config"), "is_assistant", False):
            raise ValueError(
                f"{type(self).__name__} is no assistant: its cache does not know how many tokens it has read"
            )
        if not self._is_stateful and options.get(source) is not None:
            options[target] = options.pop(source)
        return stock(self, *args, **options)

    vars(call)["stock"] = stock
    return call


def _add_common_name(model: nn.Module, args: Any, output: Any) -> None:
    if hasattr(output, OWN):
        setattr(output, COMMON, getattr(output, OWN))
