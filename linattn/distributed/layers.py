"""The layers of a model that have a state, and the refusal of those that nothing is known about."""

from typing import Any

from torch import nn

from linattn.attention.base import InnerAttention
from linattn.attention.split_heads import SplitHeads
from linattn.distributed.segments import segment
from linattn.models.language_model import Block
from linattn.models.token_model import TokenModel
from linattn.nn import GatedConvolution, MultiheadAttention, ShortConvolution, TokenShift
from linattn.nn.branch import Branch
from linattn.nn.convolution import ProjectionConvolutions
from linattn.nn.residual import Stack

# they consist of parts with states, which the wave hands on together
_COMPOSED = (MultiheadAttention, GatedConvolution)
_CELLS = (InnerAttention, ShortConvolution, TokenShift)
# they only pass on the states of their parts
_HOLDERS = (TokenModel, Block, Stack, Branch, ProjectionConvolutions, nn.ModuleList, nn.Sequential, nn.ParameterList)
# they mix tokens, with a state that nobody asks them for, or none
_MIXERS = (
    *(nn.MultiheadAttention, nn.RNNBase),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


def layers_with_states(model: nn.Module, *, composed: bool) -> dict[str, nn.Module]:
    """Return the layers that have states, by name. If `composed`, a layer of several parts with states counts as one.

    Raises ValueError for a layer that is not causal, for one that cannot be shared by ranks, and if there is no
    layer."""
    found: dict[str, nn.Module] = {}
    seen, stack = set[int](), [("", model)]
    while stack:
        name, module = stack.pop()
        # a layer that the model has twice is one layer, which is called twice
        if id(module) in seen:
            continue
        seen.add(id(module))
        _check(name, module)
        whole = isinstance(module, _CELLS) or (composed and isinstance(module, _COMPOSED))
        if whole and not _is_cross_attention(module):
            found[name] = module
        if not whole and not _is_cross_attention(module):
            stack.extend((f"{name}.{child}".lstrip("."), part) for child, part in [*module.named_children()][::-1])
    if not found:
        raise ValueError(f"{type(model).__name__} has no causal layer of linattn, so there is no state to hand on")
    return found


def without_segment(module: nn.Module) -> nn.Module | None:
    """Return the first part of a layer for which `segment` is not defined, None if there is none."""
    if isinstance(module, SplitHeads):
        return next((part for part in map(without_segment, module.parts) if part is not None), None)
    return module if segment.dispatch(type(module)) is segment.dispatch(object) else None


def _is_cross_attention(module: nn.Module) -> bool:
    return isinstance(module, MultiheadAttention) and module.is_cross_attention


def _check(name: str, module: nn.Module) -> None:
    where = f"{name or 'the model'}, a {type(module).__name__},"
    inner: Any = module.inner if isinstance(module, MultiheadAttention) else module
    if isinstance(inner, InnerAttention) and not inner.causal and not _is_cross_attention(module):
        raise ValueError(f"{where} is not causal: its tokens see those of later ranks")
    if isinstance(module, TokenShift) and module.future:
        raise ValueError(f"{where} looks ahead, at tokens of the next rank")
    if isinstance(module, _MIXERS):
        raise ValueError(f"{where} sees more than one token, and its state is not handed on between ranks")
    if hasattr(module, "extend") and not isinstance(module, (*_COMPOSED, *_CELLS, *_HOLDERS)):
        raise ValueError(f"{where} has a state of its own, for which there is no rule")
