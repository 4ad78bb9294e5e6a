"""Replace the attention of an existing model by efficient attention with the same weights."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

from torch import nn

from linattn.attention import InnerAttention
from linattn.attention.named import named_attention
from linattn.checks import check_types
from linattn.integrations.torch.attention_calls import (
    attention_modules,
    check_without_weights,
    is_attention,
    with_calls,
)
from linattn.integrations.torch.multihead import TorchMultiheadAttention, with_inner

Make = Callable[[nn.MultiheadAttention], InnerAttention]
Where = Callable[[str, Any], bool]


def everywhere(name: str, module: nn.Module) -> bool:
    """Choose every module. This is the default of `where` in `replace_attention`."""
    return True


@check_types
def replace_attention(
    model: nn.Module,
    attention: str | Make,
    *,
    where: Where = everywhere,
    window: int = 128,
    max_length: int | None = None,
    return_weights: bool = True,
) -> dict[str, nn.Module]:
    """Replace softmax attention in `model`, which keeps its weights; return the modules concerned, by name.

    In a model of transformers, such as Llama or BERT, all attention goes through `attn_implementation`. `attention`
    must then be a name, `attn_implementation` becomes "linattn:" + `attention`, and the modules returned are those that
    attend. The other options are refused, and `model.set_attn_implementation("sdpa")` undoes it.

    In any other model, each `nn.MultiheadAttention` that `where` (default: all) chooses by name and module becomes a
    `TorchMultiheadAttention`. `attention` is a name, with `window` and `max_length` as in `named_attention`, or without
    them a function that makes the inner attention for a module; if it returns the same object each time, the layers
    share it. The new modules hold the very same Parameters, so optimizers keep theirs. The old modules are returned:
    `model.set_submodule(name, old)` undoes it; then call `model.train()` or `model.eval()`, as the old modules are in
    the mode that they had. Parameters of the inner attention are new. See `TorchMultiheadAttention` for
    `return_weights`. Modules of other classes that derive from torch's are left alone, except ours.

    In a model without `nn.MultiheadAttention`, such as those of timm and diffusers, the innermost modules whose class
    has Attention in its name are replaced in the same way by copies that share everything. Each call of
    `F.scaled_dot_product_attention` in their `forward` attends by `attention`, a name without weights of its own.
    A module that attends in another way, or adds a bias to the scores, raises ValueError with its name when it is run.

    A model in which nothing is replaced raises ValueError."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, but is a {type(model).__name__}")
    if _attends_through_transformers(model):
        others = (where, window, max_length, return_weights)
        if not isinstance(attention, str) or others != (everywhere, 128, None, True):
            raise ValueError(
                f"{type(model).__name__} attends through transformers, which takes one attention by name for all "
                "layers: where, window, max_length, return_weights and functions are for nn.MultiheadAttention"
            )
        from linattn.integrations.transformers.stock_attention.hooks import set_attention

        return set_attention(model, attention)
    if not any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        if not (own := attention_modules(model)):
            raise ValueError(_nothing_found(model))
        if not isinstance(attention, str) or (max_length, return_weights) != (None, True):
            raise ValueError(
                f"{type(model).__name__} has attention of its own, which takes a name: functions, max_length and "
                "return_weights are for nn.MultiheadAttention"
            )
        check_without_weights(attention)
        return _replace(model, own, where, partial(with_calls, method=attention, window=window))
    if isinstance(attention, str):
        make: Make = partial(_named, attention, window, max_length)
    elif (window, max_length) != (128, None):
        raise ValueError("window and max_length are for attention by name, but here a function makes it")
    else:
        make = attention
    found = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if _is_replaceable(module)]
    if not found:
        raise ValueError(_nothing_found(model))
    return _replace(model, found, where, partial(_with_made, make=make, return_weights=return_weights))


def _replace(
    model: nn.Module, found: list[tuple[str, Any]], where: Where, make: Callable[[Any, str], nn.Module]
) -> dict[str, nn.Module]:
    """Replace each module in `found` that `where` chooses by the one that `make` returns for the module and its name;
    return the old modules by name."""
    places = [(name, module) for name, module in found if where(name, module)]
    if not places:
        kinds = {"nn.MultiheadAttention" if _is_replaceable(module) else type(module).__name__ for _, module in found}
        raise ValueError(f"`where` chose no {' or '.join(sorted(kinds))} of this {type(model).__name__}")
    if any(not name for name, _ in places):
        raise ValueError("the model is itself the attention: make it from its parts, with with_inner(attention, inner)")
    # a module that is in two places is replaced by one
    new = {module: make(module, name) for name, module in places}
    for name, module in places:
        model.set_submodule(name, new[module])
    return dict[str, nn.Module](places)


def _with_made(module: nn.MultiheadAttention, _: str, *, make: Make, return_weights: bool) -> nn.Module:
    return with_inner(module, make(module), return_weights=return_weights)


def _named(spec: str, window: int, max_length: int | None, module: nn.MultiheadAttention) -> InnerAttention:
    return named_attention(
        spec, num_heads=module.num_heads, head_dim=module.head_dim, window=window, max_length=max_length
    )


def _attends_through_transformers(model: nn.Module) -> bool:
    """Tell, without importing transformers, whether the model is or contains one of its models that has attention."""
    inside = [module for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return bool(inside) and any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for module in model.modules()
        for base in type(module).__mro__
    )


def _is_replaceable(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    return type(module) is nn.MultiheadAttention or isinstance(module, TorchMultiheadAttention)


def _nothing_found(model: nn.Module) -> str:
    """Return the error's message: what the model has instead of torch's modules, and what to do about it."""
    name = type(model).__name__
    kinds = Counter(map(type, model.modules()))
    found = {kind: count for kind, count in kinds.items() if is_attention(kind)}
    derived = {kind: count for kind, count in kinds.items() if issubclass(kind, nn.MultiheadAttention)}
    if not found and not derived:
        return f"there is no nn.MultiheadAttention to replace in this {name}, nor a module with Attention in its name"
    listed = ", ".join(
        f"{count} × {kind.__module__}.{kind.__qualname__}" for kind, count in {**derived, **found}.items()
    )
    if derived:
        return (
            f"the attention in this {name} is derived from nn.MultiheadAttention and may do something else: "
            f"{listed}. To replace it all the same, set with_inner(module, inner) in its place"
        )
    return (
        f"there is no nn.MultiheadAttention to replace in this {name}, whose attention is its own: {listed}. "
        "Wrap it by hand: https://linattn.github.io/linattn/drop_in.html#a-model-with-attention-of-its-own shows how"
    )
