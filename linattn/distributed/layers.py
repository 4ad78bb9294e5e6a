"""The layers of a model that have a state, and the refusal of those that nothing is known about."""

from functools import singledispatch
from typing import Any, NamedTuple, Protocol

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

_CELLS = (InnerAttention, ShortConvolution, TokenShift)
# they only pass on the states of their parts
_HOLDERS = (TokenModel, Block, Stack, Branch, MultiheadAttention, GatedConvolution, ProjectionConvolutions)
_HOLDERS += (nn.ModuleList, nn.Sequential, nn.ParameterList)
# they mix tokens, with a state that nobody asks them for, or none
_MIXERS = (
    *(nn.MultiheadAttention, nn.RNNBase),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


class ForeignLayers(Protocol):
    """The layers with states of a model of another library, by name."""

    layers: dict[str, nn.Module]

    def install(self, sharding: Any) -> None:
        """Let the layers begin with the states that the ranks before leave."""
        ...


@singledispatch
def foreign_layers(model: nn.Module) -> ForeignLayers | None:
    """Return the layers of a model of another library, None for a module that is no such model."""
    return None


class Layers(NamedTuple):
    """The smallest layers of a model that have states, such as attentions without their projections: `own` by name, and
    those of models of other libraries."""

    own: dict[str, nn.Module]
    foreign: list[ForeignLayers]

    @property
    def names(self) -> list[str]:
        return [*self.own, *(name for each in self.foreign for name in each.layers)]


def layers_with_states(model: nn.Module) -> Layers:
    """Return the layers that have states.

    Raises ValueError for a layer that is not causal, for one that cannot be shared by ranks, and if there is no
    layer."""
    found, seen, parts, stack = Layers({}, []), set[int](), set[int](), [("", model)]
    while stack:
        name, module = stack.pop()
        # a layer that the model has twice is one layer, which is called twice
        if id(module) in seen:
            continue
        seen.add(id(module))
        # a model inside of one that is foreign is a part of it
        foreign = None if id(module) in parts else foreign_layers(module)
        if foreign is not None:
            found.foreign.append(foreign)
            parts.update(map(id, module.modules()))
            seen.update(map(id, foreign.layers.values()))
        _check(name, module)
        if isinstance(module, _CELLS):
            found.own[name] = module
            # that of an attention works before it, with a state of its own
            parts_of_cell = module.named_modules(prefix=name)
            found.own.update({each: part for each, part in parts_of_cell if isinstance(part, ShortConvolution)})
        elif not is_cross_attention(module):
            stack.extend((f"{name}.{child}".lstrip("."), part) for child, part in [*module.named_children()][::-1])
    if not found.names:
        raise ValueError(f"{type(model).__name__} has no causal layer of linattn, so there is no state to hand on")
    return found


def without_segment(module: nn.Module) -> nn.Module | None:
    """Return the first part of a layer for which `segment` is not defined, None if there is none."""
    if isinstance(module, SplitHeads):
        return next((part for part in map(without_segment, module.parts) if part is not None), None)
    return module if segment.dispatch(type(module)) is segment.dispatch(object) else None


def is_cross_attention(module: nn.Module) -> bool:
    return isinstance(module, MultiheadAttention) and module.is_cross_attention


def _check(name: str, module: nn.Module) -> None:
    where = f"{name or 'the model'}, a {type(module).__name__},"
    if isinstance(module, TokenModel) and not hasattr(module, "embedding"):
        raise ValueError(f"{where} holds a model of another library, whose cache no rank hands on: shard that model")
    inner: Any = module.inner if isinstance(module, MultiheadAttention) else module
    if isinstance(inner, InnerAttention) and not inner.causal and not is_cross_attention(module):
        raise ValueError(f"{where} is not causal: its tokens see those of later ranks")
    if isinstance(module, TokenShift) and module.future:
        raise ValueError(f"{where} looks ahead, at tokens of the next rank")
    if isinstance(module, _MIXERS):
        raise ValueError(f"{where} sees more than one token, and its state is not handed on between ranks")
    if hasattr(module, "extend") and not isinstance(module, (*_CELLS, *_HOLDERS)):
        raise ValueError(f"{where} has a state of its own, for which there is no rule")
