"""Inner attentions map queries, keys and values, with heads already split, to outputs. `ATTENTIONS` lists all."""

from linattn.attention.base import InnerAttention
from linattn.attention.decay import Decay
from linattn.attention.delta import DeltaAttention
from linattn.attention.functional import attend
from linattn.attention.gates import GateNeeds, Gates
from linattn.attention.generalized_delta import GeneralizedDeltaAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.linformer import (
    LearnedProjection,
    LinformerAttention,
    MeanPooling,
    SequenceProjection,
    StridedConvolution,
)
from linattn.attention.local import LocalAttention
from linattn.attention.named import ATTENTIONS, named_attention
from linattn.attention.rotary import RotaryAttention
from linattn.attention.rotary_linear import RotaryLinearAttention
from linattn.attention.softmax import SoftmaxAttention
from linattn.attention.split_heads import SplitHeads
from linattn.attention.traits import Traits, traits
from linattn.attention.weights import attention_weights
from linattn.ops.nested import map_state

__all__ = [
    "ATTENTIONS",
    "Decay",
    "DeltaAttention",
    "GateNeeds",
    "Gates",
    "GeneralizedDeltaAttention",
    "InnerAttention",
    "LearnedProjection",
    "LinearAttention",
    "LinformerAttention",
    "LocalAttention",
    "MeanPooling",
    "RotaryAttention",
    "RotaryLinearAttention",
    "SequenceProjection",
    "SoftmaxAttention",
    "SplitHeads",
    "StridedConvolution",
    "Traits",
    "attend",
    "attention_weights",
    "map_state",
    "named_attention",
    "traits",
]
