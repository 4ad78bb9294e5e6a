"""The map of a segment: what a run of tokens does to the state of a causal layer, without the outputs.

    state after = T · state before + U

U is the state of these tokens alone. T is 1 for plain sums, exp(Σ log decay) for decays and a d × d matrix for the
delta rule. For windows, convolutions and shifts, U is the last inputs, and the past fills the places that they leave
free. Maps compose: a sequence may be cut anywhere, and its segments summed up on different devices.

    state = segment(attention, k, v, key_mask=key_mask, gates=gates).after(state)"""

from linattn.distributed.segments.base import Segment, segment
from linattn.distributed.segments.delta import DeltaSegment, delta_segment
from linattn.distributed.segments.sums import LinearSegment, RotaryLinearSegment, linear_segment
from linattn.distributed.segments.tokens import (
    InputsSegment,
    LocalSegment,
    PositionSegment,
    SoftmaxSegment,
    position_segment,
)

__all__ = [
    "DeltaSegment",
    "InputsSegment",
    "LinearSegment",
    "LocalSegment",
    "PositionSegment",
    "RotaryLinearSegment",
    "Segment",
    "SoftmaxSegment",
    "delta_segment",
    "linear_segment",
    "position_segment",
    "segment",
]
