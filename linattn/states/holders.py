"""Objects that hold a state, such as the caches of another library. The functions for states take them, too; whoever
knows such a class registers it here."""

from collections.abc import Callable
from functools import singledispatch
from types import NoneType
from typing import Any

from torch import Tensor

from linattn.models.language_model import LanguageModel
from linattn.ops import nested


@singledispatch
def held_state(holder: Any) -> Any:
    """Return the state that an object holds, if its class is registered here, and a state itself. Raise ValueError for
    anything else: a list of states is none."""
    if not isinstance(holder, Tensor | tuple | NoneType):
        raise ValueError(f"a state is a tensor or nested tuples of tensors, but this is a {type(holder).__name__}")
    return holder


@singledispatch
def hold(state: Any, example: Any) -> Any:
    """Return a new holder of `state`, like the holder `example`, or as the model `example` makes them for its states.
    If the class of `example` is not registered, return `state` itself."""
    return state


@singledispatch
def options_of(model: Any) -> dict[str, Any] | None:
    """Return what a state depends on besides the model's weights and class, None if nothing is known."""
    return None


@options_of.register
def _(model: LanguageModel) -> dict[str, Any]:
    return model.config.to_dict()


def map_state(function: Callable[[Any], Any], state: Any, *, leaf: type = Tensor) -> Any:
    """Apply `function` to every `leaf` of a state, or of the state that a holder has, such as a cache. Return the new
    state, or a new holder with it."""
    return hold(nested.map_state(function, held_state(state), leaf=leaf), state)
