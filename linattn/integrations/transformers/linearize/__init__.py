"""A pretrained softmax model of transformers made linear: plan, convert, transfer, choose layers, fine-tune."""

from linattn.integrations.transformers.linearize.choose import Choice, choose_layers
from linattn.integrations.transformers.linearize.convert import Conversion, convert, make_teacher, restore_layers
from linattn.integrations.transformers.linearize.distance import divergence, layer_errors
from linattn.integrations.transformers.linearize.folder import Linearized, linearized_class, load_linearized
from linattn.integrations.transformers.linearize.parts import LinearizedAttention, linearized_layers
from linattn.integrations.transformers.linearize.plan import LayerPlan, Plan, plan
from linattn.integrations.transformers.linearize.training import Budget, Progress, Training
from linattn.integrations.transformers.linearize.transfer import Rates, fine_tune, transfer

__all__ = [
    "Budget",
    "Choice",
    "Conversion",
    "LayerPlan",
    "Linearized",
    "LinearizedAttention",
    "Plan",
    "Progress",
    "Rates",
    "Training",
    "choose_layers",
    "convert",
    "divergence",
    "fine_tune",
    "layer_errors",
    "linearized_class",
    "linearized_layers",
    "load_linearized",
    "make_teacher",
    "plan",
    "restore_layers",
    "transfer",
]
