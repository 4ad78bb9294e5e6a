"""Layers that have segments, with their inputs: keys and values of split heads, or tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.attention import (
    DeltaAttention,
    InnerAttention,
    LinearAttention,
    LocalAttention,
    RotaryLinearAttention,
    SoftmaxAttention,
    SplitHeads,
)
from linattn.attention.decay import Decay
from linattn.attention.gates import GateNeeds, begin_sequences
from linattn.distributed.segments import segment
from linattn.feature_maps import ElementwiseFeatureMap, FavorFeatureMap
from linattn.nn.convolution import ShortConvolution
from linattn.nn.starts import first_present
from linattn.nn.token_shift import TokenShift
from linattn.ops.nested import map_state
from tests.attention.cases import CAUSAL, CHANNELS, KEY_HEADS, gates_of, heads, make

DIM = 6


def linear(name: str, needs: GateNeeds | None = None, **options: Any) -> InnerAttention:
    feature_map = FavorFeatureMap(CHANNELS, 8) if name == "favor" else ElementwiseFeatureMap(name)
    return LinearAttention(feature_map, causal=True, needs=needs, **options)


UNNAMED: dict[str, Callable[[], nn.Module]] = {
    "elu, fixed decay": lambda: linear("elu_plus_one", decay=Decay(KEY_HEADS)),
    "elu, decays per channel": lambda: linear("elu_plus_one", GateNeeds("channel")),
    "elu, both decays": lambda: linear("elu_plus_one", GateNeeds("channel"), decay=Decay(KEY_HEADS)),
    "exp, fixed decay": lambda: linear("exp", decay=Decay(KEY_HEADS)),
    "favor, decays per head": lambda: linear("favor", GateNeeds("head")),
    "a write alone": lambda: linear("identity", GateNeeds(write="strength"), normalize=None),
    "keys of any length": lambda: DeltaAttention(decay="head", unit_keys=False),
    "window of one token": lambda: LocalAttention(1, causal=True),
    "window of three": lambda: LocalAttention(3, causal=True),
    "fast rotation": lambda: RotaryLinearAttention(ElementwiseFeatureMap("relu"), causal=True, base=2.0),
    "a mixture in another": lambda: SplitHeads(
        (4, SplitHeads((2, DeltaAttention()), (2, SoftmaxAttention(causal=True))))
    ),
}
# of keys: for exponents far from each other, and for states that do not grow
SIZES = {"favor": 5, "exp, fixed decay": 30, "favor, decays per head": 5, "keys of any length": 0.3}
ATTENTIONS = [*(spec for spec, _ in CAUSAL), *UNNAMED]
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: ShortConvolution(DIM, 4),
    "convolution of one token": lambda: ShortConvolution(DIM, 1),
    "token shift": lambda: TokenShift((1, 0)),
    "token shift by three": lambda: TokenShift((3, 1, 0)),
}
PACKED = ("convolution", "convolution of one token")


class Case(NamedTuple):
    """A layer, tensors of n tokens, and what the two functions under test have in common."""

    layer: Any
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]

    def cut(self, start: int, stop: int) -> "Case":
        """Of masks, gates and inputs, with or without heads, the tokens stand at the place of n = dimension 1 or 2."""
        dim = 1 if self.inputs[0].ndim == 3 else 2
        options = {
            name: map_state(lambda x: x.narrow(min(dim, x.ndim - 1), start, stop - start), part)
            for name, part in self.options.items()
        }
        return self._replace(inputs=tuple(x.narrow(dim, start, stop - start) for x in self.inputs), options=options)

    def extend(self, state: Any) -> Any:
        if isinstance(self.layer, InnerAttention):
            # the state depends on no query
            q = self.inputs[0].repeat_interleave(2, 1)
            return self.layer.extend(q, *self.inputs, state, **self.options)[1]
        return self.layer.extend(*self.inputs, state, **self.options)[1]

    def segment(self) -> Any:
        return segment(self.layer, *self.inputs, **self.options)


def case(name: str, n: int, *, b: int = 2, masked: bool = False, packed: bool = False) -> Case:
    torch.manual_seed(n)
    key_mask, starts = (
        torch.rand(b, n) < share if wanted else None for share, wanted in ((0.6, masked), (0.3, packed))
    )
    if name in TOKENS:
        options = {"key_mask": key_mask} | ({"starts": starts} if packed else {})
        return Case(TOKENS[name]().double(), (torch.randn(b, n, DIM, dtype=torch.float64),), options)
    inner: Any = UNNAMED[name]().double() if name in UNNAMED else getattr(make(name, True), "inner", make(name, True))
    _, k, v = heads(n, b=b)
    k = SIZES.get(name, 1) * k
    gates = gates_of(inner.needs, k)
    if starts is not None:
        gates = begin_sequences(inner.needs, gates, first_present(starts, key_mask))
    return Case(inner, (k, v), {"key_mask": None if key_mask is None else key_mask.unsqueeze(1), "gates": gates})
