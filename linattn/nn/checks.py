"""Checks of tokens, the inputs of modules, made once at the boundary, so that errors show what the caller passed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from linattn.checks import check_boolean, check_floating, check_tensors

# others, such as quantized and adapted layers, convert their inputs by themselves
_PLAIN = (nn.Linear, NonDynamicallyQuantizableLinear, nn.Conv2d)


def check_input(x: Tensor, layer: nn.Module, *, name: str = "x") -> None:
    """Raise ValueError unless x has the device and, outside of autocast, the dtype of the layer's weights."""
    if not isinstance(x, Tensor):
        check_tensors(**{name: x})
    weight: Any = getattr(layer, "weight", None)
    if weight is None or (x.dtype == weight.dtype and x.device == weight.device):
        return
    # a hook may move the weights, or convert the input
    if torch.compiler.is_compiling() or type(layer) not in _PLAIN:
        return
    if layer._forward_pre_hooks or "forward" in vars(layer):
        return
    check_tensors(**{name: x, "the module": weight})
    is_autocast = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
    if not is_autocast or not x.is_floating_point() or x.dtype == torch.float64:
        raise ValueError(f"{name} must be {weight.dtype}, as the weights, but is {x.dtype}")


def check_channels(x: Tensor, layer: nn.Module) -> None:
    """Raise ValueError unless x has the channels, device and dtype that the layer takes."""
    check_input(x, layer)
    # an adapter need not say how many
    channels = getattr(layer, "in_features", None)
    if channels is not None and x.shape[-1:] != (channels,):
        raise ValueError(f"x must have {channels} channels, but is {tuple(x.shape)}")


def check_tokens(
    x: Tensor, dim: int | None, key_mask: Tensor | None = None, *, name: str = "x", layer: nn.Module | None = None
) -> None:
    """Raise ValueError unless x is (b, n, dim), None for any dim, and fits its mask and the weights of the `layer`."""
    check_floats(x, name=name)
    if x.ndim != 3 or dim not in (None, x.shape[2]):
        raise ValueError(f"{name} must be (b, n, {dim or 'channels'}), but is {tuple(x.shape)}")
    check_mask(x, key_mask, name=name)
    if layer is not None:
        check_input(x, layer, name=name)


def check_floats(x: Tensor, weight: Tensor | None = None, *, name: str = "x") -> None:
    """Raise ValueError unless x is a tensor of floating-point numbers, on the device of a module's weight."""
    check_floating(**{name: x})
    if weight is not None and x.device != weight.device:
        check_tensors(**{name: x, "the module": weight})


def check_mask(x: Tensor, mask: Tensor | None, *, name: str = "x", starts: bool = False) -> None:
    """Raise ValueError unless a mask is None or boolean (b, n). With `starts`, messages call it starts."""
    if mask is None:
        return
    what, meaning = ("starts", "a sequence begins") if starts else ("key_mask", "a token is present")
    check_boolean(mask, name=what, meaning=meaning)
    if mask.device != x.device:
        check_tensors(**{name: x, what: mask})
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{what} must be {tuple(x.shape[:2])}, as {name}, but is {tuple(mask.shape)}")


def check_indices(tokens: Tensor, key_mask: Tensor | None, *, name: str = "tokens") -> None:
    """Raise ValueError unless tokens are int64 or int32 (b, n) and their mask boolean (b, n)."""
    if not isinstance(tokens, Tensor):
        check_tensors(**{name: tokens})
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32 (b, n), but are {tokens.dtype} {tuple(tokens.shape)}")
    check_mask(tokens, key_mask, name=name)


def out_of_range(what: str, indices: Tensor, size: int) -> ValueError:
    """Return the error for `indices` of which some are not in a table of `size` rows; `what` is their name."""
    return ValueError(f"{what} must be in [0, {size}), but go from {int(indices.min())} to {int(indices.max())}")


def checked_head_dim(dim: int, num_heads: int, num_key_heads: int, head_dim: int | None) -> int:
    """Return head_dim or dim / num_heads. Raise ValueError if it or num_heads / num_key_heads is no integer."""
    if num_heads % num_key_heads:
        raise ValueError(f"num_key_heads must divide num_heads, but they are {num_key_heads} and {num_heads}")
    if head_dim is not None:
        return head_dim
    if dim % num_heads:
        raise ValueError(f"num_heads must divide dim, or head_dim be given, but they are {num_heads} and {dim}")
    return dim // num_heads
