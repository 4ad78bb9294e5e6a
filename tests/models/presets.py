"""The options of attention in the published architectures."""

import inspect
from typing import Any

from linattn.models import PRESETS
from linattn.nn import MultiheadAttention


def attention_options(name: str) -> dict[str, Any]:
    """Return the options of a preset that `MultiheadAttention` takes."""
    arguments = inspect.signature(MultiheadAttention).parameters
    return {option: value for option, value in PRESETS[name].options.items() if option in arguments}
