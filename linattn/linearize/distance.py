"""The distance of a linearized model from its teacher: of their outputs, and layer by layer."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from linattn.integrations.transformers.documents import present_keys
from linattn.linearize.attention import LinearizedAttention, linearized_layers, named_arguments, own_attention
from linattn.linearize.calls import Batch, run
from linattn.models.loss import NO_LABEL
from linattn.nn.modes import evaluating


class Diverged(ValueError):
    """Raised for a loss that is not finite."""


def relative_error(
    y: Float[Tensor, "*b d"], target: Float[Tensor, "*b d"], mask: Bool[Tensor, "*b"] | None = None
) -> Float[Tensor, ""]:
    """Return the mean square of y − target as a share of the target's variance over tokens, for the tokens in `mask`
    (None: all)."""
    if mask is not None:
        y, target = y[mask], target[mask]
    target = target.flatten(0, -2)
    spread = (target - target.mean(0)).square().mean()
    # a single token has no variance
    return (y.flatten(0, -2) - target).square().mean() / torch.where(spread == 0, 1, spread)


def output_distance(model: PreTrainedModel, output: Any, target: Any, batch: Batch) -> Float[Tensor, ""]:
    """Return the distance of a model's output from the teacher's, its `target`.

    It is the mean KL divergence in nats over the predictions that have a label, or over the present tokens of a batch
    without labels; for a model without logits, the relative error of its hidden states."""
    (y, _), (expected, _) = (predictions(model, batch, each) for each in (output, target))
    if "logits" not in target:
        return relative_error(y, expected)
    return F.kl_div(y.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean")


def predictions(model: PreTrainedModel, batch: Batch, output: Any) -> tuple[Float[Tensor, "places c"], Tensor | None]:
    """Return the logits that have a label, in float32 or better, with these labels. Without labels or without logits,
    return the vectors of all present tokens, and None."""
    y = main_output(output)
    y = y if y.dtype == torch.float64 else y.float()
    labels = aligned_labels(model, batch, y) if "logits" in output else None
    mask = present_tokens(batch, y) if labels is None else labels != NO_LABEL
    y = y.flatten(0, -2) if mask is None else y[mask]
    if not len(y):
        raise ValueError("each batch must ask for a prediction, but one has no label or no next token")
    return y, None if labels is None else labels[mask]


def main_output(output: Any) -> Tensor:
    """Return the logits of a model's output, or the hidden states of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if name in output:
            return output[name]
    raise ValueError(f"a model must put out logits or last_hidden_state, but this one puts out {', '.join(output)}")


def aligned_labels(model: PreTrainedModel, batch: Batch, logits: Tensor) -> Tensor | None:
    """Return the labels aligned with the logits (shifted for next-token models), None for a batch without any."""
    labels = batch.get("labels")
    if labels is None or labels.shape != logits.shape[: labels.ndim]:
        return None
    labels = labels.to(logits.device)
    return F.pad(labels[:, 1:], (0, 1), value=NO_LABEL) if predicts_next(model) else labels


def present_tokens(batch: Batch, outputs: Tensor) -> Tensor | None:
    """Return the attention mask if the outputs are per token, None if they are per sequence or if there is no mask."""
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return (
        None if mask is None or outputs.ndim < 3 or mask.shape != outputs.shape[:2] else mask.bool().to(outputs.device)
    )


def predicts_next(model: PreTrainedModel) -> bool:
    """Return True if the output at a token predicts the next token, as a decoder's does."""
    return model.can_generate() and not model.config.is_encoder_decoder


def with_labels(model: PreTrainedModel, batch: Batch) -> Batch:
    """Return a language model's batch with its tokens as labels, if it has none. Padding gets no label."""
    if "labels" in batch or not predicts_next(model):
        return batch
    labels, mask = batch["input_ids"], batch.get("attention_mask")
    return {**batch, "labels": labels if mask is None else labels.masked_fill(mask == 0, NO_LABEL)}


@torch.no_grad()
def divergence(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Return the mean of `output_distance` over the batches."""
    require_batches(batches)
    with evaluating(model), evaluating(teacher):
        distances = [float(output_distance(model, run(model, each), run(teacher, each), each)) for each in batches]
    return math.fsum(distances) / len(distances)


def require_batches(batches: Sequence[Batch]) -> None:
    if not batches:
        raise ValueError("give at least one batch: there is none to run the model on")


@torch.no_grad()
def layer_errors(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> dict[int, float]:
    """Return the mean relative error on `batches` of each linearized layer, given its teacher's input, by its index."""
    require_batches(batches)
    with evaluating(model):
        outputs = [layer_outputs(model, teacher, batch) for batch in batches]
    return {
        index: math.fsum(float(relative_error(*layers[index])) for layers in outputs) / len(outputs)
        for index in outputs[0]
    }


class LayerOutputs(NamedTuple):
    """The output `y` of a layer, the `target`, the teacher's for the same input, and the `mask` of present tokens."""

    y: Float[Tensor, "b n d"]
    target: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"] | None


def layer_outputs(model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> dict[int, LayerOutputs]:
    """Run the teacher once, and each linearized layer on the input of the teacher's layer; return the outputs by the
    layers' indices. Gradients flow into the layers if they are enabled."""
    outputs: dict[int, LayerOutputs] = {}
    gradients = torch.is_grad_enabled()

    def compare(layer: nn.Module, own: LinearizedAttention) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            with torch.set_grad_enabled(gradients):
                y = layer(*args, **options)[0]
            mask = named_arguments(own, args, options).get("attention_mask")
            # the mask of cross-attention is that of the other sequence
            mask = present_keys(mask) if own.spec.dim > 0 else None
            # later layers may add to this output in place
            outputs[own.spec.index] = LayerOutputs(y, output[0].clone(), mask)

        return hook

    with ExitStack() as stack:
        for name, layer in linearized_layers(model).items():
            hook = compare(layer, own_attention(layer))
            stack.callback(teacher.get_submodule(name).register_forward_hook(hook, with_kwargs=True).remove)
        stack.enter_context(evaluating(teacher))
        stack.enter_context(torch.no_grad())
        run(teacher, batch)
    return outputs


def layer_distance(model: PreTrainedModel, batch: Batch, outputs: LayerOutputs) -> Float[Tensor, ""]:
    """Return the relative error of a layer's `outputs`. Where only some tokens of the `batch` have labels, return the
    mean of that and of the error at these tokens, which would otherwise count little."""
    error = relative_error(*outputs)
    labels = None if model.config.is_encoder_decoder else aligned_labels(model, batch, outputs.y)
    if labels is None or labels.ndim < 2 or not (mask := labels != NO_LABEL).any():
        return error
    return (error + relative_error(outputs.y, outputs.target, mask)) / 2
