"""The conversion of a stock model in place, and its undoing."""

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.checks import check_sizes, check_types
from linattn.integrations.transformers.stock_attention.attention import OWN
from linattn.linearize.attention import LinearizedAttention, attach, detach, linearized_layers, own_attention
from linattn.linearize.calls import SOFTMAX, Batch, attention_names
from linattn.linearize.closed_form import set_projections, set_shares
from linattn.linearize.folder import check_stock, describe
from linattn.linearize.plan import Plan, module_sizes


@dataclass(frozen=True)
class Conversion:
    """Holds a `model` that was linearized by the `plan`, the `teacher`, a frozen copy of the model before, the names of
    the `attention` functions that the model and its parts used before, and the `initial` values of its new weights, by
    name."""

    model: PreTrainedModel
    teacher: PreTrainedModel
    plan: Plan
    attention: dict[str, Any]
    initial: dict[str, Tensor]

    def reset(self) -> None:
        """Restore the weights as they were right after the conversion, before any training. Layers that are softmax
        again stay so."""
        known = self.model.state_dict().keys()
        weights = self.teacher.state_dict() | self.initial
        self.model.load_state_dict({name: x for name, x in weights.items() if name in known})

    def undo(self) -> None:
        """Restore the model as it was before the conversion, bit by bit, also after training."""
        linear = [own_attention(layer).spec.index for layer in linearized_layers(self.model).values()]
        restore_layers(self.model, self.teacher, linear)
        self.model.load_state_dict(self.teacher.state_dict())
        self.model.set_attn_implementation(self.attention)


@check_types
def convert(model: PreTrainedModel, plan: Plan, batches: Sequence[Batch] = (), *, shared: bool = False) -> Conversion:
    """Replace attention in place as the plan says, and return a record that can undo it. The model keeps its weights.

    The projections of a plan with a `key_dim` are computed from the model's queries and keys on the `batches`, and so
    is the share of the linear part beside a window (an eighth without batches). The model then saves, generates and
    trains as before; `load_linearized` says how to load it.

    If `shared`, the teacher has no weights of its own but those of the model, until `transfer` or `fine_tune` train
    them. This saves memory. Do not train or change such a model otherwise, as its teacher would change, too."""
    if linearized_layers(model):
        raise ValueError("the model is linearized already: undo that before it is converted again")
    check_stock(model)
    names = {name for name, _ in model.named_modules()}
    if missing := [layer.name for layer in plan.layers if layer.name not in names]:
        raise ValueError(f"the plan is for another model: this one has no {', '.join(missing)}")
    for layer in plan.replaced:
        sizes = module_sizes(model.get_submodule(layer.name))
        if other := [f"{x}, not {y}" for x, y in zip(sizes, layer.sizes, strict=False) if x != y]:
            raise ValueError(f"the plan is for another model: {layer.name} has {'; '.join(other)}")
    attention, teacher = attention_names(model.config), make_teacher(model, shared=shared)
    owns = {layer.name: LinearizedAttention(layer.spec) for layer in plan.layers if layer.spec is not None}
    for name, own in owns.items():
        weight = next(model.get_submodule(name).parameters())
        own.to(device=weight.device, dtype=weight.dtype)
    set_projections(teacher, owns, batches)
    set_shares(teacher, owns, batches)
    # the model changes only after everything that can fail
    for name, own in owns.items():
        attach(model.get_submodule(name), own)
    describe(model, teacher.config)
    model.set_attn_implementation(SOFTMAX)
    new = {f"{name}.{OWN}.": own.state_dict() for name, own in owns.items()}
    initial = {prefix + key: x.clone() for prefix, weights in new.items() for key, x in weights.items()}
    return Conversion(model, teacher, plan, attention, initial)


@check_types
def make_teacher(model: PreTrainedModel, *, shared: bool = False) -> PreTrainedModel:
    """Return a frozen copy of a model in evaluation. It attends by our softmax, for the linearized model's masks. If
    `shared`, its weights are those of the model, not copies."""
    weights = {id(weight): weight for weight in model.parameters()} if shared else {}
    teacher = copy.deepcopy(model, weights).eval()
    if not shared:
        teacher.requires_grad_(False)
    teacher.set_attn_implementation(SOFTMAX)
    return teacher


def give_own_weights(teacher: PreTrainedModel, weights: Iterable[nn.Parameter]) -> None:
    """Give a teacher copies of those of its weights that it shares with its model and that are among the `weights`,
    which are about to change."""
    changing, copies = {id(weight) for weight in weights}, {}
    for module in teacher.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) in changing:
                # several modules may share a weight
                if id(weight) not in copies:
                    copies[id(weight)] = nn.Parameter(weight.detach().clone(), requires_grad=False)
                module._parameters[name] = copies[id(weight)]


def restore_layers(model: PreTrainedModel, teacher: PreTrainedModel, layers: Collection[int]) -> None:
    """Restore softmax attention, with the teacher's weights, in the linear layers with these indices."""
    if not isinstance(layers, Collection) or isinstance(layers, str):
        raise ValueError(f"layers must be a collection of indices, but is {layers!r}")
    check_sizes(layers=tuple(layers), least=0)
    linear = {own_attention(module).spec.index: name for name, module in linearized_layers(model).items()}
    if unknown := sorted(set(layers) - set(linear)):
        raise ValueError(f"layers has {unknown}, but the linear layers are {sorted(linear)}")
    for index in set(layers):
        module = model.get_submodule(linear[index])
        detach(module)
        module.load_state_dict(teacher.get_submodule(linear[index]).state_dict())
    describe(model, teacher.config)
