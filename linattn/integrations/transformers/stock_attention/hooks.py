"""Registration of our attention with transformers, as `attn_implementation="linattn:elu"` and so on.

transformers has registries for such functions. Three functions of transformers itself are wrapped besides, with effect
for our names only: mixtures are registered at their first use, models that never call the registry raise an error, and
caches hold our states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn, TypeGuard

import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, cache_utils

from linattn.attention import ATTENTIONS, traits
from linattn.attention.named import SYNONYMS
from linattn.checks import check_types
from linattn.integrations.transformers.stock_attention.attention import attention_forward
from linattn.integrations.transformers.stock_attention.cache import ATTENTION_LAYER
from linattn.integrations.transformers.stock_attention.masks import ALWAYS_MASKED, attention_mask
from linattn.integrations.transformers.stock_attention.obstacles import check_model, keeps_own_attention
from linattn.integrations.transformers.stock_attention.whisper import keep_states
from linattn.names import did_you_mean

PREFIX = "linattn:"
REPLACED = {"full_attention", "sliding_attention"}
"""transformers' names of cache layers that ours replace."""


def _obstacle(name: str) -> str | None:
    """Return why transformers cannot use the attention by its name alone; None: it can."""
    facts = traits(name)
    if facts.fixed_length:
        return "has weights and a length of its own, which a name cannot hold"
    if facts.learned or facts.gated:
        weights = "makes gates from the layer's input" if facts.gated else "has weights of its own"
        call = f"convert(model, plan(model, method={name!r}, window=0, convolution=0, decay=False))"
        return f"{weights}, which a name cannot hold: `{call}` of linattn.linearize gives each layer new ones, to train"
    return None


METHODS = tuple(sorted(name for name in ATTENTIONS if _obstacle(name) is None))


@check_types
def register_attention(method: str) -> str:
    """Register the attention named `method`, as in `named_attention`, with transformers; return "linattn:" + method.

    "linattn:elu" and so on are registered by the import, and mixtures such as "linattn:local+taylor2" when a
    model first uses them: call this if a name must be known earlier."""
    for part in method.split("+"):
        name = part.partition(":")[0].strip()
        if name not in METHODS:
            unknown = f"is no attention{did_you_mean(name, METHODS, SYNONYMS)}: there are {', '.join(METHODS)}"
            reason = _obstacle(name) if name in ATTENTIONS else unknown
            raise ValueError(f"{name!r} in {PREFIX}{method} {reason}")
    AttentionInterface.register(PREFIX + method, partial(attention_forward, method))
    AttentionMaskInterface.register(PREFIX + method, attention_mask)
    return PREFIX + method


def set_attention(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """Set `attn_implementation="linattn:" + method` in every model of transformers inside `model` that has attention
    (a backbone of convolutions has none); return the attention modules, by name.

    Raises ValueError, before any of the models changes, if the attention of one cannot be replaced."""
    name = register_attention(method)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel) and _attends(module)]
    for each in models:
        check_model(each)
    for each in models:
        each.set_attn_implementation(name)
    return {
        name: module for name, module in model.named_modules() if isinstance(getattr(module, "is_causal", None), bool)
    }


def attended_modules(model: PreTrainedModel, /, **inputs: Any) -> list[str]:
    """Run the model on `inputs`, and return the names of the modules that attended by our method.

    Raises ValueError if there is none: a model that never calls transformers' registry accepts every name, without
    effect."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not is_ours(implementation):
        raise ValueError(f"the attention of this {type(model).__name__} is {implementation!r}, not one of {PREFIX}…")
    names, calls = {module: name for name, module in model.named_modules()}, []
    with watched(implementation, lambda module, *_, **__: calls.append(names.get(module, type(module).__name__))):
        model(**inputs)
    if not calls:
        raise ValueError(f"{type(model).__name__} ignores attn_implementation: its attention is its own")
    return calls


@contextmanager
def watched(implementation: str, see: Callable[..., None]) -> Iterator[None]:
    """Call `see` with the arguments of each call of the attention function `implementation` inside the block."""
    function = AttentionInterface._global_mapping[implementation]

    def seen(module: nn.Module, *args: Any, **options: Any) -> Any:
        see(module, *args, **options)
        return function(module, *args, **options)

    AttentionInterface.register(implementation, seen)
    try:
        yield
    finally:
        AttentionInterface.register(implementation, function)


def install() -> None:
    """Register all methods and wrap transformers' functions."""
    for method in METHODS:
        register_attention(method)
    cache_utils.STATIC_LAYER_TYPE_MAPPING[ATTENTION_LAYER] = _refuse_static
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _with_checked_name)
    _wrap(PreTrainedModel, "set_attn_implementation", _with_checked_model)
    _wrap(cache_utils, "get_layer_types_and_kwargs", _with_our_layers)


def is_ours(implementation: Any) -> TypeGuard[str]:
    return isinstance(implementation, str) and implementation.startswith(PREFIX)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        raise ImportError(
            f"transformers {transformers.__version__} has no {owner.__name__}.{name}, which linattn needs: it was "
            "written for 5.24"
        )
    setattr(owner, name, wraps(original)(lambda *args, **options: wrapper(original, *args, **options)))


def _with_checked_name(
    original: Callable[..., str], model: PreTrainedModel, requested: str | None, *args: Any, **options: Any
) -> str:
    if is_ours(requested):
        if keeps_own_attention(model):
            return original(model, None, *args, **options)
        _check_model(model)
        register_attention(requested.removeprefix(PREFIX))
    return original(model, requested, *args, **options)


def _with_checked_model(
    original: Callable[..., None], model: PreTrainedModel, requested: str | dict[str, Any], *args: Any, **options: Any
) -> None:
    if is_ours(requested):
        _check_model(model)
        if not _attends(model):
            raise ValueError(f"{type(model).__name__} has no attention that {requested} could replace")
    original(model, requested, *args, **options)


def _attends(model: nn.Module) -> bool:
    return any(hasattr(module, "is_causal") for module in model.modules())


def _check_model(model: PreTrainedModel) -> None:
    check_model(model)
    keep_states(type(model))
    if not model._supports_sdpa:
        ALWAYS_MASKED.add(type(model.config))


def _with_our_layers(
    original: Callable[..., tuple[list[str], list[dict[str, Any]]]], config: PreTrainedConfig
) -> tuple[list[str], list[dict[str, Any]]]:
    kinds, options = original(config)
    if not is_ours(config._attn_implementation):
        return kinds, options
    if "chunked_attention" in kinds:
        raise ValueError(f"{type(config).__name__}: attention in chunks has no state here: give use_cache=False")
    pairs = zip(kinds, options, strict=True)
    layers = [(ATTENTION_LAYER, {}) if kind in REPLACED else (kind, each) for kind, each in pairs]
    return [kind for kind, _ in layers], [each for _, each in layers]


def _refuse_static(**_: Any) -> NoReturn:
    raise ValueError("cache_implementation: linattn's states have a constant size already, so no cache is preallocated")
