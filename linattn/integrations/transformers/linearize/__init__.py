"""A pretrained softmax model of transformers made linear: plan, convert, transfer, choose layers, fine-tune, report."""

from linattn.integrations.transformers.linearize.choose import Choice, choose_layers
from linattn.integrations.transformers.linearize.controls import CONTROLS, controlled, entropies
from linattn.integrations.transformers.linearize.convert import Conversion, convert, make_teacher, restore_layers
from linattn.integrations.transformers.linearize.distance import divergence, layer_errors
from linattn.integrations.transformers.linearize.folder import Linearized, linearized_class, load_linearized
from linattn.integrations.transformers.linearize.parts import LinearizedAttention, linearized_layers
from linattn.integrations.transformers.linearize.plan import LayerPlan, Plan, plan
from linattn.integrations.transformers.linearize.report import Probes, Report, report
from linattn.integrations.transformers.linearize.scores import Scores, scores
from linattn.integrations.transformers.linearize.training import Budget, Progress, Training
from linattn.integrations.transformers.linearize.transfer import Rates, fine_tune, transfer

__all__ = [
    "CONTROLS",
    "Budget",
    "Choice",
    "Conversion",
    "LayerPlan",
    "Linearized",
    "LinearizedAttention",
    "Plan",
    "Probes",
    "Progress",
    "Rates",
    "Report",
    "Scores",
    "Training",
    "choose_layers",
    "controlled",
    "convert",
    "divergence",
    "entropies",
    "fine_tune",
    "layer_errors",
    "linearized_class",
    "linearized_layers",
    "load_linearized",
    "make_teacher",
    "plan",
    "report",
    "restore_layers",
    "scores",
    "transfer",
]
