"""The distance of a linearized model to its teacher: in the outputs, and layer by layer."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from linattn.linearize.observe import Batch, evaluating, run
from linattn.linearize.parts import LinearizedAttention, linearized_layers, own_attention

IGNORED = -100
"""The label of a token that nothing is asked about, in transformers' models."""
NOTHING_ASKED = "each batch must ask for a prediction, but one has no label or no next token"


class Diverged(ValueError):
    """Says that a loss is not finite."""


def relative_error(
    y: Float[Tensor, "*b d"], target: Float[Tensor, "*b d"], present: Bool[Tensor, "*b"] | None = None
) -> Float[Tensor, ""]:
    """Return the mean square of y − target as a share of the target's variance over tokens."""
    if present is not None:
        y, target = y[present], target[present]
    target = target.flatten(0, -2)
    spread = (target - target.mean(0)).square().mean()
    # a single token has no variance
    return (y.flatten(0, -2) - target).square().mean() / torch.where(spread == 0, 1, spread)


def output_distance(model: PreTrainedModel, output: Any, target: Any, batch: Batch) -> Float[Tensor, ""]:
    """Return the mean KL divergence from the teacher's output, in nats per prediction that a label asks for, or per
    present token without labels; for a model without logits, the relative error of its hidden states."""
    y, expected = main_output(output), main_output(target)
    if "logits" not in target:
        return relative_error(y, expected, present_tokens(batch, expected))
    found, expected = (F.log_softmax(x.float(), -1) for x in (y, expected))
    distance = F.kl_div(found, expected, log_target=True, reduction="none").sum(-1)
    labels = aligned_labels(model, batch, target.logits)
    mask = present_tokens(batch, target.logits) if labels is None else labels != IGNORED
    distance = distance if mask is None else distance[mask]
    if not distance.numel():
        raise ValueError(NOTHING_ASKED)
    return distance.mean()


def main_output(output: Any) -> Tensor:
    """Return the logits of a model's output, or the hidden states of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if name in output:
            return output[name]
    raise ValueError(f"a model must put out logits or last_hidden_state, but this one puts out {', '.join(output)}")


def predicts_next(model: PreTrainedModel) -> bool:
    """Tell whether the output at a token is about the next one, as a decoder's is."""
    return model.can_generate() and not model.config.is_encoder_decoder


def with_labels(model: PreTrainedModel, batch: Batch) -> Batch:
    """Give a language model's batch its tokens as labels, if it has none; padding is not predicted."""
    if "labels" in batch or not predicts_next(model):
        return batch
    labels, mask = batch["input_ids"], batch.get("attention_mask")
    return {**batch, "labels": labels if mask is None else labels.masked_fill(mask == 0, IGNORED)}


def divergence(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Return the mean of `output_distance` over the batches."""
    require_batches(batches)
    with evaluating(model), evaluating(teacher):
        found = [output_distance(model, run(model, batch), run(teacher, batch), batch).item() for batch in batches]
    return math.fsum(found) / len(found)


def require_batches(batches: Sequence[Batch]) -> None:
    if not batches:
        raise ValueError("give at least one batch: there is none to run the model on")


def layer_errors(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> dict[int, float]:
    """Return the mean relative error on the `batches` of each linearized layer, by its index, given the teacher's own
    input of that layer."""
    require_batches(batches)
    with evaluating(model):
        found = [matched_layers(model, teacher, batch) for batch in batches]
    return {
        index: math.fsum(float(relative_error(*outputs[index])) for outputs in found) / len(found) for index in found[0]
    }


class Matched(NamedTuple):
    """The output `y` of a layer and the teacher's, its `target`, for the same input, and the mask of present tokens."""

    y: Float[Tensor, "b n d"]
    target: Float[Tensor, "b n d"]
    present: Bool[Tensor, "b n"] | None


def matched_layers(model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> dict[int, Matched]:
    """Run the teacher once, give each linearized layer the input of its own, and return their outputs. Gradients flow
    into the layers where they are on."""
    outputs: dict[int, Matched] = {}
    gradients = torch.is_grad_enabled()

    def compare(layer: nn.Module, own: LinearizedAttention) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            with torch.set_grad_enabled(gradients):
                y, target = layer(*args, **options)[0], output[0]
                mask = own.named(args, options).get("attention_mask")
                # the mask of cross-attention is that of the other sequence
                is_of_tokens = isinstance(mask, Tensor) and mask.dtype == torch.bool and own.spec.dim > 0
                # what comes after may add to an output in place
                outputs[own.spec.index] = Matched(y, target.clone(), mask if is_of_tokens else None)

        return hook

    with ExitStack() as stack:
        for name, layer in linearized_layers(model).items():
            hook = compare(layer, own_attention(layer))
            stack.callback(teacher.get_submodule(name).register_forward_hook(hook, with_kwargs=True).remove)
        stack.enter_context(evaluating(teacher))
        run(teacher, batch)
    return outputs


def layer_distance(model: PreTrainedModel, batch: Batch, outputs: Matched) -> Float[Tensor, ""]:
    """Return the relative error of a layer, or where labels ask for the predictions of some tokens, the mean of it and
    of the error at these: what they need must not be lost among the rest."""
    error = relative_error(*outputs)
    labels = None if model.config.is_encoder_decoder else aligned_labels(model, batch, outputs.y)
    if labels is None or labels.ndim < 2 or not (asked := labels != IGNORED).any():
        return error
    return (error + relative_error(outputs.y, outputs.target, asked)) / 2


def aligned_labels(model: PreTrainedModel, batch: Batch, logits: Tensor) -> Tensor | None:
    """Return the label that each of the logits is about, IGNORED for none, or None for a batch without such labels."""
    labels = batch.get("labels")
    if labels is None or labels.shape != logits.shape[: labels.ndim]:
        return None
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if predicts_next(model) else labels


def present_tokens(batch: Batch, outputs: Tensor) -> Tensor | None:
    """Return the mask of the tokens that the outputs are of, if they are of tokens and not of rows."""
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return None if mask is None or outputs.ndim < 3 or mask.shape != outputs.shape[:2] else mask.bool()
