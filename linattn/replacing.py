"""Replace the attention of an existing model by efficient attention with the same weights."""

from functools import partial

from torch import nn

from linattn.attention import InnerAttention
from linattn.attention.named import named_attention
from linattn.nn.replace import Make, Where, everywhere, replace_multihead_attention


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

    In a model of transformers, such as Llama or BERT, all attention goes through `attn_implementation`: it is set to
    "linattn:" + `attention`, as a name, and the modules returned are those that attend. The other options are then
    refused, and `model.set_attn_implementation("sdpa")` undoes it.

    In any other model, each `nn.MultiheadAttention` that `where` (default: all) chooses by name and module becomes a
    `TorchMultiheadAttention`. `attention` is a name, with `window` and `max_length` as in `named_attention`, or without
    them a function that makes the inner attention for a module; if it returns the same object each time, the layers
    share it. The new modules hold the very same Parameters, so optimizers keep theirs. The old modules are returned:
    `model.set_submodule(name, old)` undoes it. Parameters of the inner attention are new. See `TorchMultiheadAttention`
    for `return_weights`. Modules of other classes that derive from torch's are left alone, except ours.

    A model in which nothing is replaced raises ValueError."""
    if _attends_through_transformers(model):
        if not isinstance(attention, str) or (where, window, max_length, return_weights) != (
            everywhere,
            128,
            None,
            True,
        ):
            raise ValueError(
                f"{type(model).__name__} attends through transformers, which takes one attention by name for all "
                "layers: where, window, max_length, return_weights and functions are for nn.MultiheadAttention"
            )
        from linattn.integrations.transformers.hooks import set_attention

        return set_attention(model, attention)
    if isinstance(attention, str):
        make: Make = partial(_named, attention, window, max_length)
    elif (window, max_length) != (128, None):
        raise ValueError("window and max_length are for attention by name, but here a function makes it")
    else:
        make = attention
    return {**replace_multihead_attention(model, make, where=where, return_weights=return_weights)}


def _named(spec: str, window: int, max_length: int | None, module: nn.MultiheadAttention) -> InnerAttention:
    return named_attention(
        spec, num_heads=module.num_heads, head_dim=module.head_dim, window=window, max_length=max_length
    )


def _attends_through_transformers(model: nn.Module) -> bool:
    """Tell by names, because transformers is loaded only if the model is its own."""
    inside = [module for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return bool(inside) and any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for module in model.modules()
        for base in type(module).__mro__
    )
