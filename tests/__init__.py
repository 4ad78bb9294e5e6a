"""The tests, and how they check annotations: `pytest --jaxtyping-packages=linattn,tests.checked`."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# an int is a float to every type checker (PEP 484), so it is one here
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add checks to what jaxtyping calls before a function, with its parameters and any result, and after it, with both
    once more. The latter checks the result alone: the parameters have been checked, and have set the sizes."""
    if (result := function.__annotations__.get("return", Any)) is not Any:
        function.__annotations__ = {"return": result}
    return _check(function)
