"""Attention modules of any class whose `forward` calls `F.scaled_dot_product_attention`, as those of timm and diffusers
do: a copy of the module shares all its parts and passes these calls to another attention."""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linattn.attention import traits
from linattn.attention.functional import attend
from linattn.integrations.torch.masks import TorchMasks, read_masks


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the innermost modules, with their names, whose class has Attention in its name, except those of
    transformers and of this package."""
    return [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if is_attention(type(module))
        and not any(is_attention(type(part)) for part in module.modules() if part is not module)
        and not type(module).__module__.startswith(("transformers.", "linattn."))
    ]


def is_attention(kind: type[nn.Module]) -> bool:
    return "attention" in kind.__name__.lower() and not issubclass(kind, nn.MultiheadAttention)


def check_without_weights(method: str) -> None:
    """Raise ValueError if the method has weights or gates: a copy of a module has no place for them."""
    facts = traits(method)
    if facts.learned or facts.gated:
        raise ValueError(
            f"{method!r} has weights to learn, which a module that calls F.scaled_dot_product_attention has no place "
            "for: write a module around named_attention, or choose a method without weights"
        )


def with_calls(module: nn.Module, name: str, *, method: str, window: int) -> nn.Module:
    """Return a copy of an attention module that attends by `method`, with the very same parameters and submodules.

    The `name` is that of the module in its model, for errors. A `forward` that another library has set on the module
    raises ValueError, because the copy would leave it out."""
    replaced = module.__dict__.get("forward")
    if replaced is not None and getattr(replaced, "func", None) is not _forward:
        raise ValueError(
            f"{name} has a forward that something else has set, such as a hook of accelerate: replace attention first"
        )
    new = copy.copy(module)
    new.forward = partial(_forward, new, name, method, window if "local" in method else None)
    return new


class _Calls(TorchFunctionMode):
    """Passes calls of `F.scaled_dot_product_attention` inside its block to `method`, and counts them."""

    def __init__(self, method: str, window: int | None) -> None:
        super().__init__()
        self.method, self.window, self.count = method, window, 0
        self.has_gradients = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.count += 1
        if self.method == "softmax":
            return func(*args, **kwargs)
        if self.has_gradients and not torch.is_grad_enabled():
            raise ValueError(
                "it attends without gradients, as inside of a checkpoint with use_reentrant=True, which would compute "
                "softmax attention in the backward pass: checkpoint the module as a whole"
            )
        return _attend(self.method, self.window, *args, **kwargs)


def _forward(module: nn.Module, name: str, method: str, window: int | None, /, *args: Any, **options: Any) -> Any:
    """Run the `forward` of the module's class. A module that attends in another way raises ValueError."""
    kind = f"{name} ({type(module).__module__}.{type(module).__qualname__})"
    calls = _Calls(method, window)
    with calls:
        try:
            result = type(module).forward(module, *args, **options)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
    if not calls.count:
        raise ValueError(
            f"{kind} does not attend by F.scaled_dot_product_attention, so {method!r} cannot replace its attention: "
            "leave it as it is by `where`, or wrap it by hand"
        )
    return result


def _attend(
    method: str,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with the arguments of `F.scaled_dot_product_attention`. In training, dropout drops keys, each for all
    queries of its head. `enable_gqa` only says what the shapes show."""
    present, leading = None, query.shape[:-2]
    if attn_mask is not None:
        n, m = query.shape[-2], key.shape[-2]
        if attn_mask.ndim < 2 or attn_mask.shape[-2] not in (1, n) or attn_mask.shape[-1] not in (1, m):
            raise ValueError(f"attn_mask must be (…, {n}, {m}) or have a 1 there, but is {tuple(attn_mask.shape)}")
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise ValueError(f"attn_mask must be bool, True where it shows, or float, but is {attn_mask.dtype}")
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
        # unlike in nn.MultiheadAttention, is_causal adds the causal order to the mask; torch after 2.13 refuses both
        present, ordered = read_masks(TorchMasks(None, hidden, False))
        is_causal = is_causal or ordered
    if len(leading) < 2:
        # there is a batch, but no dimension of heads
        query, key, value = (x.unsqueeze(-3) for x in (query, key, value))
        present = present if present is None or present.ndim < 2 else present.unsqueeze(-2)
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    if dropout_p:
        value = value * F.dropout(value.new_ones(*value.shape[:-1], 1), dropout_p)
    seen = None if present is None else present.unsqueeze(-2)
    y = attend(query, key, value, method, is_causal=is_causal, attn_mask=seen, window=window)
    return y.reshape(*leading, *y.shape[-2:])
