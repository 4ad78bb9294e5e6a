"""Arguments of a wrong type: every public constructor and function answers with a ValueError that names the argument,
for all its numbers, strings, booleans and functions, as the annotations say which they are."""

import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import torch
from torch import nn

import linattn
from linattn import models, named_attention
from linattn.models.token_model import TokenModel

pytestmark = pytest.mark.usefixtures("unchecked")

# what users import; what transformers itself defines, such as its configurations, checks its arguments by itself
MODULES = [
    "linattn",
    "linattn.states",
    "linattn.integrations.torch",
    "linattn.linearize",
    "linattn.integrations.transformers",
]
MODULES += [f"linattn.compat.{name}" for name in ("fast_transformers", "linear_attention_transformer", "linformer")]
MODULES += ["linattn.compat.performer_pytorch", "linattn.compat.linear_multihead_attention"]
# records of results, states, records that are checked where they are used, and a class with transformers' arguments
RECORDS = {"AttentionState", "Choice", "Conversion", "Features", "LayerPlan", "LinattnCache", "LinattnConfig", "Plan"}
RECORDS |= {"Preset", "Progress", "Report", "Scores", "SoftmaxComparison", "SpeedUp", "Training", "Traits"}
RECORDS |= {"Compressed", "GateNeeds", "NewToken", "Prefix", "StateFile", "StatefulTrainer"}
RECORDS |= {"LinformerContextSettings", "LinformerSettings"}

WRONG = {int: (1.5, "1", True), float: ("1", True, math.nan), bool: ("no", 2), str: (3, []), NoneType: ()}
WRONG |= {os.PathLike[str]: (3, b"text"), dict[str, str]: ("text", ["text"], {"text": 1}, {1: "text"})}
RIGHT = {int: 4, float: 0.5, bool: False, str: "elu"}


def members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def wrong_values(kind: Any) -> Iterable[Any]:
    if kind in WRONG:
        return WRONG[kind]
    if get_origin(kind) is Callable:
        return "relu", 2
    entry, *others = get_args(kind)
    lengths = () if get_origin(kind) is Sequence or Ellipsis in others else (len(others), len(others) + 2)
    return [*((x,) for x in WRONG[entry]), *((RIGHT[entry],) * length for length in lengths)]


def is_plain(kind: Any) -> bool:
    """Return whether a wrong value of the kind can be made."""
    is_series = get_origin(kind) in (tuple, Sequence) and get_args(kind)[0] in WRONG
    return kind in WRONG or is_series or get_origin(kind) is Callable


def plain_arguments() -> Iterator[Any]:
    """Yield (function, argument, wrong values) for each argument of numbers, strings and booleans, tuples of them, and
    functions."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            function = getattr(module, name)
            if not callable(function) or name in RECORDS or inspect.isabstract(function):
                continue
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind is parameter.VAR_POSITIONAL:
                    continue
                kinds = members(parameter.annotation)
                if all(map(is_plain, kinds)):
                    # values of each kind that no other kind of the union takes
                    wrong = [x for kind in kinds for x in wrong_values(kind) if not any(fits(x, one) for one in kinds)]
                    values = wrong if NoneType in kinds else [None, *wrong]
                    where = f"{module.__name__}.{name}-{parameter.name}"
                    yield pytest.param(function, parameter.name, values, id=where)


def arguments_of(kind: type, name: str = ".*") -> Iterator[Any]:
    """Yield (class, argument) for each argument of a public module that is a number of the kind and has such a name."""
    for public in linattn.__all__:
        module = getattr(linattn, public)
        if inspect.isclass(module) and issubclass(module, nn.Module) and not inspect.isabstract(module):
            for parameter in inspect.signature(module).parameters.values():
                if kind in members(parameter.annotation) and re.fullmatch(name, parameter.name):
                    yield pytest.param(module, parameter.name, id=f"{public}-{parameter.name}")


def functions_of_models() -> Iterator[Any]:
    """Yield (function, argument) for each argument of a public function that is a model of tokens."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            function = getattr(module, name)
            if callable(function) and name not in RECORDS:
                for parameter in inspect.signature(function).parameters.values():
                    if parameter.annotation is TokenModel:
                        yield pytest.param(function, parameter.name, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize(("function", "name"), list(functions_of_models()))
@pytest.mark.parametrize(("value", "what"), [("gpt2", "'gpt2'"), (3, "a int"), (nn.Linear(2, 2), "a Linear")])
def test_what_is_no_model_of_tokens_is_refused(function: Any, name: str, value: Any, what: str) -> None:
    positional, others = other_arguments(function, name)
    with pytest.raises(ValueError, match=f"needs a TokenModel, such as a LanguageModel, but this is {what}"):
        function(*positional, **others, **{name: value})


def arguments_that_are_parts() -> Iterator[Any]:
    """Yield (function, argument) for each argument of an attention, a feature map, a layer or a model that is a module
    or a generator."""
    packages = linattn.attention, linattn.feature_maps, linattn.nn, linattn.models
    for name in sorted({name for package in packages for name in package.__all__}):
        function = getattr(linattn, name)
        if callable(function) and not inspect.isabstract(function) and name not in RECORDS:
            for parameter in inspect.signature(function).parameters.values():
                kinds = [kind for kind in members(parameter.annotation) if inspect.isclass(kind) and kind != NoneType]
                if kinds and all(issubclass(kind, (nn.Module, torch.Generator)) for kind in kinds):
                    yield pytest.param(function, parameter.name, id=f"{name}-{parameter.name}")


@pytest.mark.parametrize(("function", "name"), list(arguments_that_are_parts()))
def test_what_is_no_part_is_refused_at_once(function: Any, name: str) -> None:
    required = inspect.signature(function).parameters[name].default is inspect.Parameter.empty
    for wrong in (3, 0.9, "nonsense", torch.zeros(2), nn.Linear, *([None] if required else [])):
        positional, others = other_arguments(function, name)
        others |= {"causal": True} if name == "decay" else {}
        with pytest.raises(ValueError, match=rf"\b{name}\b|is needed here, but") as error:
            function(*positional, **others, **{name: wrong})
            pytest.fail(f"{name}={wrong!r} is taken")
        assert not re.search(r"\ba [AEIO]", str(error.value))


# numbers of things of which there may be none, and a choice
MAY_BE_ZERO = {"convolution", "padding", "scaling"}


@pytest.mark.parametrize(("module", "name"), list(arguments_of(int)))
def test_a_size_that_is_too_small_is_named(module: type[nn.Module], name: str) -> None:
    positional, others = other_arguments(module, name)
    for size in (-1, -2) if name in MAY_BE_ZERO else (0, -1, -2):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*{size}\b"):
            module(*positional, **others, **{name: size})
            pytest.fail(f"{name}={size} is taken")


@pytest.mark.parametrize(("module", "name"), list(arguments_of(float, ".*dropout")))
def test_dropout_is_a_probability(module: type[nn.Module], name: str) -> None:
    positional, others = other_arguments(module, name)
    for dropout in (-0.5, 1.5):
        with pytest.raises(ValueError, match=rf"dropout .*between 0 and 1, but .*{dropout}"):
            module(*positional, **others, **{name: dropout})
            pytest.fail(f"{name}={dropout} is taken")


def fits(value: Any, kind: type) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)


def other_arguments(function: Any, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the required arguments but `name`, positional ones and those by name."""
    q, parameters = torch.rand(1, 2, 3, 4), inspect.signature(function).parameters
    features = linattn.Features(q)
    tensors: dict[str, Any] = dict.fromkeys(("q", "k", "v", "data", "projection_matrix"), q)
    tensors |= {"beta": q[..., 0], "cu_seqlens": torch.tensor([0, 2]), "logits": q[0, 0], "tokens": q[0, 0]}
    tensors |= {"queries": features, "keys": features, "state": linattn.summarize_features(features, q)}
    tensors["state"] = tensors["state"] if "queries" in parameters else tensors["state"].sums
    positional, others = [], {}
    for other in parameters.values():
        if other.default is inspect.Parameter.empty and other.name != name:
            kind = members(other.annotation)[0]
            value = tensors[other.name] if other.name in tensors else RIGHT.get(kind, PARTS.get(other.name))
            if other.kind is other.POSITIONAL_ONLY:
                positional.append(value)
            else:
                others[other.name] = value
    return positional, others


EMBEDDING, STACK = nn.Embedding(9, 8), linattn.ResidualSequence([])
PARTS = {
    "embedding": EMBEDDING,
    "stack": STACK,
    "encoder": linattn.SequenceModel(EMBEDDING, STACK),
    "function": torch.relu,
    "kernel": torch.relu,
    "key_projection": linattn.MeanPooling(9, 3),
    "inner": named_attention("elu", num_heads=4, head_dim=4, causal=True),
    "feature_map": linattn.TaylorFeatureMap(),
    "module": nn.Identity(),
    "model": models.LanguageModel(linattn.LanguageModelConfig(vocab_size=9, dim=8, depth=1, num_heads=2)),
    "prompts": [[1, 2]],
    "prompt": [1, 2],
    "requests": [],
    "shape": (2, 2),
}


@pytest.mark.parametrize(("function", "name", "values"), list(plain_arguments()))
def test_an_argument_of_a_wrong_type_is_named(function: Any, name: str, values: list[Any]) -> None:
    positional, others = other_arguments(function, name)
    for value in values:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            function(*positional, **others, **{name: value})
            pytest.fail(f"{name}={value!r} is taken")
