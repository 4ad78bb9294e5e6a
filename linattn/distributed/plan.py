"""The plan of tensor parallelism: the dimension of each weight that belongs to heads, and what each rank has of it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from linattn.attention.base import InnerAttention
from linattn.attention.decay import Decay
from linattn.attention.delta import DeltaAttention
from linattn.attention.generalized_delta import GeneralizedDeltaAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.linformer import LearnedProjection, LinformerAttention, MeanPooling, StridedConvolution
from linattn.attention.local import LocalAttention
from linattn.attention.rotary import RotaryAttention
from linattn.attention.rotary_linear import RotaryLinearAttention
from linattn.attention.softmax import SoftmaxAttention
from linattn.attention.split_heads import SplitHeads
from linattn.distributed.shares import Ranges, Share, for_own_heads, on_first_rank, own_ranges, own_shard, slices
from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.feature_maps.random_projection import RandomProjection
from linattn.models.token_model import TokenModel
from linattn.nn import FeedForward, GatedFeedForward, MultiheadAttention, ShortConvolution
from linattn.nn.convolution import ProjectionConvolutions
from linattn.nn.gates import (
    BoundedDecay,
    ChannelDecay,
    ChannelRate,
    HeadDecay,
    PartGates,
    SigmoidDecay,
    TokenGates,
    WriteStrength,
)
from linattn.nn.norms import HeadNorm

# the parts of an attention: the dimension of each tensor, or of a linear layer's outputs, that belongs to heads; None
# where all heads share it
_RULES: dict[type[nn.Module], dict[str, int | None]] = {
    HeadDecay: {"proj": 0, "A_log": 0, "dt_bias": 0},
    ChannelDecay: {"in_proj": None, "out_proj": 0, "A_log": 0, "dt_bias": 0},
    SigmoidDecay: {"in_proj": None, "out_proj": 0},
    BoundedDecay: {"in_proj": None, "out_proj": 0, "bias": 0},
    ChannelRate: {"in_proj": None, "out_proj": 0},
    WriteStrength: {"proj": 0},
    GeneralizedDeltaAttention: {"removal_weight": 0, "write_weight": 0},
    PerHeadLinear: {"weight": 0, "bias": 0},
    Decay: {"w": 0, "log_decay": 0},
    ShortConvolution: {"weight": None, "bias": None},
    HeadNorm: {"weight": None},
    StridedConvolution: {"weight": None},
    LearnedProjection: {"weight": None},
}
# the parts that treat all heads alike
_ALIKE = {LinearAttention, DeltaAttention, LocalAttention, SoftmaxAttention, LinformerAttention, SplitHeads}
_ALIKE |= {RotaryAttention, RotaryLinearAttention, RandomProjection, MeanPooling, TokenGates, PartGates}
_ALIKE |= {nn.ModuleList, nn.ModuleDict}


class _Axis(NamedTuple):
    """The heads of each part of a mixture, and the channels per head, along a dimension of a weight."""

    heads: tuple[int, ...]
    channels: int

    def ranges(self, mesh: DeviceMesh) -> Ranges:
        """Return the channels of this rank: those of its share of the heads of each part."""
        lengths = [count * self.channels for count in self.heads]
        shares = [length // mesh.size() for length in lengths]
        starts = [sum(lengths[:i]) + mesh.get_local_rank() * share for i, share in enumerate(shares)]
        return tuple(zip(starts, shares, strict=True))


class Plan:
    """Records how the ranks of the `mesh` share a `model`, without changing it: the names of the `layers`; the
    placement of each parameter; the shares with which each module computes, with the mesh if each rank has only a part
    of the gradient of its inputs; the `last` projections, whose outputs are summed; the mixtures; and the norms over
    all heads.

    Raises ValueError for what the ranks of the `mesh` cannot share."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh):
        self.mesh = mesh
        self.layers: list[str] = []
        self.placements: dict[Tensor, Placement] = {}
        self.shares: list[tuple[nn.Module, list[Share], DeviceMesh | None]] = []
        self.last: list[nn.Module] = []
        self.mixtures: dict[SplitHeads, None] = {}
        self.norms: list[HeadNorm] = []
        inside: set[nn.Module] = set()
        for name, module in model.named_modules():
            kind = next((kind for kind in _LAYERS if isinstance(module, kind)), None)
            if kind is not None:
                self.layers.append(name)
                self.shares.append((module, list(_LAYERS[kind](self, module, name)), mesh))
                inside.update(module.modules())
        for name, module in model.named_modules():
            if module not in inside:
                self._replicate(module, name)

    def attention(self, module: MultiheadAttention, name: str) -> Iterator[Share]:
        projections = (module.q_proj, module.k_proj, module.v_proj, module.g_proj, module.o_proj)
        self._check_linear(name, *projections, dropout=module.hidden_dropout)
        writes, key_dim, head_dim = module.writes, module.key_dim, module.head_dim
        num_heads, key_writes = (x.out_features // key_dim for x in (module.q_proj, module.k_proj))
        num_key_heads = key_writes // writes
        heads = _heads_of_parts(module.inner, num_heads)
        key_heads = tuple(count * num_key_heads // num_heads for count in heads)
        for what, counts in (("heads", heads), ("key heads", key_heads)):
            for count in counts:
                self._check_divides(name, count, f"{what} of each part, {counts}" if len(counts) > 1 else what)
        q, k = _Axis(heads, key_dim), _Axis(key_heads, writes * key_dim)
        v, y = _Axis(key_heads, writes * head_dim), _Axis(heads, head_dim)
        for layer, axis in zip(projections[:-1], (q, k, v, y), strict=True):
            yield from self._shares(layer, {"weight": 0, "bias": 0}, axis)
        yield from self._last(module.o_proj, y)
        yield from self._shares(module, {"value_skip": 0}, _Axis(heads, 1))
        if module.gated_norm is not None:
            self.norms.append(module.gated_norm)
            yield from self._shares(module.gated_norm, {"weight": 0}, y)
        convolution = module.convolution
        if isinstance(convolution, ProjectionConvolutions):
            for part, axis in zip(convolution.parts, (q, k, v), strict=True):
                yield from self._shares(part, {"weight": 1, "bias": 0}, axis)
        else:
            yield from self._by_rules(convolution, f"{name}.convolution")
        for part in ("gates", "inner", "head_norm"):
            yield from self._by_rules(getattr(module, part), f"{name}.{part}")

    def feed_forward(self, module: FeedForward | GatedFeedForward, name: str) -> Iterator[Share]:
        first = (module.up_proj,) if isinstance(module, FeedForward) else (module.gate_proj, module.up_proj)
        self._check_linear(name, *first, module.down_proj, dropout=module.hidden_dropout)
        self._check_divides(name, module.up_proj.out_features, "hidden units")
        for layer in first:
            yield from self._shares(layer, {"weight": 0, "bias": 0})
        yield from self._last(module.down_proj)

    def _by_rules(self, module: nn.Module | None, name: str) -> Iterator[Share]:
        if module is None:
            return
        rules, is_plain_map = _RULES.get(type(module), {}), isinstance(module, FeatureMap) and not _tensors(module)
        if type(module) not in _ALIKE and not rules and not is_plain_map:
            raise ValueError(f"{name} is a {type(module).__name__}, for which tensor parallelism has no rule")
        if isinstance(module, LearnedProjection) and module.weight.ndim == 3:
            rules = {"weight": 0}
        if isinstance(module, SplitHeads):
            self.mixtures[module] = None
        for part, dim in rules.items():
            child = getattr(module, part, None)
            if isinstance(child, nn.Linear):
                yield from self._shares(child, {"weight": dim, "bias": dim})
            else:
                yield from self._shares(module, {part: dim})
        for part, child in module.named_children():
            if part not in rules:
                yield from self._by_rules(child, f"{name}.{part}")

    def _last(self, layer: nn.Linear, axis: _Axis | None = None) -> Iterator[Share]:
        """Yield the shares of the parameters of a projection whose outputs are summed over the ranks. `axis` says which
        heads or units of its input belong to a rank."""
        self.last.append(layer)
        yield from self._shares(layer, {"weight": 1}, axis)
        if layer.bias is not None:
            self.placements[layer.bias] = Replicate()
            yield Share(layer, "bias", on_first_rank)

    def _shares(
        self, owner: nn.Module | None, dims: dict[str, int | None], axis: _Axis | None = None
    ) -> Iterator[Share]:
        """Yield the share of each tensor in `dims` that `owner` has. `dims` maps its name to the dimension that belongs
        to heads (None: all heads use the whole tensor)."""
        tensors = {} if owner is None else _tensors(owner)
        for name, dim in dims.items():
            tensor = tensors.get(name)
            if owner is None or tensor is None:
                continue
            if isinstance(tensor, nn.Parameter):
                self.placements[tensor] = Replicate() if dim is None else Shard(dim)
            if dim is None:
                yield Share(owner, name, for_own_heads)
            elif axis is not None and len(axis.heads) > 1:
                yield Share(owner, name, partial(own_ranges, dim=dim, ranges=axis.ranges(self.mesh)))
            elif isinstance(tensor, nn.Parameter):
                yield Share(owner, name, own_shard)
            else:
                yield Share(owner, name, partial(slices, dim=dim, ranges=_Axis((len(tensor),), 1).ranges(self.mesh)))

    def _replicate(self, module: nn.Module, name: str) -> None:
        """Replicate the module `name`, which has no heads: every rank computes all of it."""
        if isinstance(module, InnerAttention):
            kind = type(module).__name__
            raise ValueError(f"{name} is a {kind} outside of a MultiheadAttention, for which there is no rule")
        if type(module).forward is nn.Module.forward:
            return
        lists = [x for x in module.children() if isinstance(x, (nn.ParameterList, nn.ParameterDict))]
        owners = []
        for owner in (module, *lists):
            for part, tensor in owner.named_parameters(recurse=False):
                self.placements.setdefault(tensor, Replicate())
                owners.append((owner, part))
        if isinstance(module, TokenModel) and module.tied:
            owners.append((module.embedding, "weight"))
        if owners:
            self.shares.append((module, [Share(owner, part, own_shard) for owner, part in owners], None))

    def _check_divides(self, name: str, count: int, what: str) -> None:
        if count % self.mesh.size():
            size = self.mesh.size()
            raise ValueError(f"{name}: the number of ranks, {size}, must divide the {what}, but there are {count}")

    def _check_linear(self, name: str, *layers: nn.Module | None, dropout: nn.Dropout) -> None:
        for layer in layers:
            if layer is not None and type(layer) is not nn.Linear:
                raise ValueError(f"the projections of {name} must be nn.Linear, but one is a {type(layer).__name__}")
        if dropout.p:
            raise ValueError(f"{name}: hidden_dropout must be 0 with tensor parallelism, but is {dropout.p}")


_LAYERS: dict[type[nn.Module], Callable[..., Iterator[Share]]] = {
    MultiheadAttention: Plan.attention,
    FeedForward: Plan.feed_forward,
    GatedFeedForward: Plan.feed_forward,
}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, without those of its children."""
    return {name: x for name, x in (module._parameters | module._buffers).items() if x is not None}


def _heads_of_parts(inner: nn.Module, num_heads: int) -> tuple[int, ...]:
    """Return the number of heads of each part of a mixture, in order, or (`num_heads`,) for an attention that is no
    mixture."""
    if isinstance(inner, RotaryAttention):
        return _heads_of_parts(inner.inner, num_heads)
    if not isinstance(inner, SplitHeads):
        return (num_heads,)
    pieces = zip(inner.parts, inner.heads, strict=True)
    return tuple(count for part, heads in pieces for count in _heads_of_parts(part, heads))
