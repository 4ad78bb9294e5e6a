"""A pretrained softmax model of transformers made linear: plan, convert, transfer, choose layers, fine-tune, report."""

from linattn.checks import extra

with extra("transformers"):
    from linattn.linearize.attention import LinearizedAttention, linearized_layers
    from linattn.linearize.choice import Choice, choose_layers
    from linattn.linearize.controls import CONTROLS, controlled, entropies
    from linattn.linearize.conversion import Conversion, convert, make_teacher, restore_layers
    from linattn.linearize.distance import divergence, layer_errors
    from linattn.linearize.folder import Linearized, linearized_class, load_linearized
    from linattn.linearize.plan import LayerPlan, Plan, plan
    from linattn.linearize.report import Probes, Report, report
    from linattn.linearize.scores import Scores, scores
    from linattn.linearize.stages import Rates, fine_tune, transfer
    from linattn.linearize.training import Budget, Progress, Training

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
