"""Replace torch's attention in existing models by efficient attention with the same weights."""

from collections import Counter
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import nn

from linattn.attention.base import InnerAttention
from linattn.attention.named import resolved_attention
from linattn.nn.torch_multihead import TorchMultiheadAttention

Make = Callable[[nn.MultiheadAttention], InnerAttention]
Where = Callable[[str, nn.MultiheadAttention], bool]


def everywhere(name: str, module: nn.MultiheadAttention) -> bool:
    """Choose every module, by name and module."""
    return True


def replace_multihead_attention(
    model: nn.Module, make: Make, *, where: Where, return_weights: bool
) -> dict[str, nn.MultiheadAttention]:
    """Replace each `nn.MultiheadAttention` that `where` chooses; return the old modules by name."""
    places = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if _is_replaceable(module) and where(name, module)
    ]
    if not places:
        raise ValueError(_nothing_found(model))
    if any(not name for name, _ in places):
        raise ValueError("the model is itself the attention: make it from its parts, with with_inner(attention, inner)")
    # a module that is in two places is replaced by one
    new = {module: with_inner(module, make(module), return_weights=return_weights) for _, module in places}
    for name, module in places:
        model.set_submodule(name, new[module])
    return dict(places)


def with_inner(
    attention: nn.MultiheadAttention, inner: InnerAttention | str, *, return_weights: bool = True
) -> TorchMultiheadAttention:
    """Return the projections of `attention`, with the very same Parameters, around another inner attention.

    See `TorchMultiheadAttention` for `inner` and `return_weights`."""
    # made outside of the meta device, where random features would be lost
    inner = resolved_attention(inner, num_heads=attention.num_heads, head_dim=attention.head_dim)
    sizes = attention.embed_dim, attention.num_heads, attention.dropout
    added = attention.in_proj_bias is not None, attention.bias_k is not None, attention.add_zero_attn
    inputs = attention.kdim, attention.vdim, attention.batch_first
    with torch.device("meta"):
        new = TorchMultiheadAttention(*sizes, *added, *inputs, inner=inner, return_weights=return_weights)
    for name, weight in attention.named_parameters(recurse=False):
        setattr(new, name, weight)
    new.out_proj = attention.out_proj
    new.inner.to(device=attention.out_proj.weight.device, dtype=attention.out_proj.weight.dtype)
    return new.train(attention.training)


def _is_replaceable(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    return type(module) is nn.MultiheadAttention or isinstance(module, TorchMultiheadAttention)


def _nothing_found(model: nn.Module) -> str:
    """Return the error's message: what the model has instead of torch's modules, and what to do about it."""
    name = type(model).__name__
    if any(map(_is_replaceable, model.modules())):
        return f"`where` chose no nn.MultiheadAttention of this {name}"
    kinds = Counter(map(type, model.modules()))
    derived = {kind for kind in kinds if issubclass(kind, nn.MultiheadAttention)}
    found = {kind: count for kind, count in kinds.items() if kind in derived or "attention" in kind.__name__.lower()}
    if not found:
        return f"there is no nn.MultiheadAttention to replace in this {name}, nor a module with Attention in its name"
    listed = ", ".join(f"{count} × {kind.__module__}.{kind.__qualname__}" for kind, count in found.items())
    if derived:
        return (
            f"the attention in this {name} is derived from nn.MultiheadAttention and may do something else: "
            f"{listed}. To replace it all the same, set with_inner(module, inner) in its place"
        )
    return (
        f"there is no nn.MultiheadAttention to replace in this {name}, whose attention is its own: {listed}. "
        'Wrap it by hand: docs/drop_in.md, "A model with attention of its own", shows how'
    )
