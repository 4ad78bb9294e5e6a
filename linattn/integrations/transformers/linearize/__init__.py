"""A pretrained softmax model of transformers made linear: plan, convert, transfer, choose layers, fine-tune."""

from linattn.integrations.transformers.linearize.convert import Conversion, convert, make_teacher, restore_layers
from linattn.integrations.transformers.linearize.folder import Linearized, linearized_class, load_linearized
from linattn.integrations.transformers.linearize.parts import LinearizedAttention, linearized_layers
from linattn.integrations.transformers.linearize.plan import LayerPlan, Plan, plan

__all__ = [
    "Conversion",
    "LayerPlan",
    "Linearized",
    "LinearizedAttention",
    "Plan",
    "convert",
    "linearized_class",
    "linearized_layers",
    "load_linearized",
    "make_teacher",
    "plan",
    "restore_layers",
]
