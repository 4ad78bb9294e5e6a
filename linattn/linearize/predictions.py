"""The predictions of a model on a batch, beside those of its teacher.

A large vocabulary has too many logits for all tokens at once: then they are computed from the last hidden states, in
pieces, and all that is measured is a sum over the pieces."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from linattn.linearize.calls import Batch, check_batch, run
from linattn.models.loss import NO_LABEL

PIECE = 1 << 25
"""The most logits that exist at once: 134 MB in float32."""
# models that change the logits of their heads, as soft caps do
_CHANGED: WeakSet[nn.Module] = WeakSet()


class Predictions(NamedTuple):
    """Holds the outputs, such as logits, at all places that have a label, with these `labels`; without labels, those of
    all present tokens, and None.

    The outputs are `head(vectors)`, or the `vectors` themselves (None). `classify` is true if their softmax is a
    distribution. `loss` is the model's own on the batch, None if it computed none."""

    vectors: Float[Tensor, "places c"]
    head: nn.Linear | None
    labels: Int[Tensor, " places"] | None
    classify: bool
    loss: Tensor | None

    def outputs(self, places: slice) -> Float[Tensor, "some c"]:
        """Return some of the outputs, in float32 or better."""
        y = self.vectors[places]
        return accurate(y if self.head is None else self.head(y))

    def piece_length(self) -> int:
        """Return the largest number of predictions whose outputs, such as logits, may be in memory at once."""
        return max(1, PIECE // (self.vectors.shape[-1] if self.head is None else self.head.out_features))


def predict(model: PreTrainedModel, batch: Batch, *, inputs: Batch | None = None) -> Predictions:
    """Run the model on the `inputs` (None: on the batch), and return the predictions that the batch has labels for."""
    check_batch(batch)
    inputs = batch if inputs is None else inputs
    head = _large_head(model, batch)
    if head is not None and (hidden := _last_hidden(model, head, inputs)) is not None:
        return _select(model, batch, hidden, head, True, None)
    output = run(model, inputs)
    y = main_output(output)
    classify = "logits" in output and _is_distribution(model, batch, y)
    return _select(model, batch, y, None, classify, output.get("loss"))


def run_body(model: PreTrainedModel, batch: Batch) -> None:
    """Run a model, without its head if that has many outputs."""
    head = _large_head(model, batch)
    if head is None:
        run(model, batch)
    else:
        _run_without(model, head, batch)


def pieces(found: Predictions, target: Predictions) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield the outputs of a model, those of its teacher, and the labels, as many places at once as `PIECE` allows."""
    length, count = min(found.piece_length(), target.piece_length()), len(found.vectors)
    for start in range(0, count, length):
        places = slice(start, start + length)
        yield found.outputs(places), target.outputs(places), None if found.labels is None else found.labels[places]


def divergence_sum(y: Float[Tensor, "places c"], target: Float[Tensor, "places c"]) -> Float[Tensor, ""]:
    """Return KL(softmax(`target`) ‖ softmax(y)), both given as logits, in nats, summed over places."""
    return F.kl_div(y.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="sum")


def _is_distribution(model: PreTrainedModel, batch: Batch, logits: Tensor) -> bool:
    """Return False for logits of a regression or of several labels at once, which have no softmax."""
    problem, labels = model.config.problem_type, batch.get("labels")
    separate = problem in ("regression", "multi_label_classification") or logits.shape[-1] == 1
    return not separate and (labels is None or not labels.is_floating_point())


def _large_head(model: PreTrainedModel, batch: Batch) -> nn.Linear | None:
    """Return the last layer of a language model if its logits on the batch are too many to exist at once."""
    head, config = model.get_output_embeddings(), model.config
    tokens = batch.get("decoder_input_ids" if config.is_encoder_decoder else "input_ids")
    # the loss of such routers is more than that of the logits
    routed = getattr(config, "output_router_logits", False)
    if tokens is None or routed or model in _CHANGED or not isinstance(head, nn.Linear):
        return None
    return head if tokens.numel() * head.out_features > PIECE else None


class _Hidden(nn.Module):
    """Takes the place of a model's head: returns its input, and keeps it."""

    hidden: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        return hidden


def _run_without(model: PreTrainedModel, head: nn.Linear, inputs: Batch) -> tuple[Any, Tensor | None]:
    """Run the model with a head that returns its input; return the output, and this input."""
    name = next(name for name, module in model.named_modules() if module is head)
    instead = _Hidden()
    model.set_submodule(name, instead)
    try:
        return run(model, {name: x for name, x in inputs.items() if name != "labels"}), instead.hidden
    finally:
        model.set_submodule(name, head)


def _last_hidden(model: PreTrainedModel, head: nn.Linear, inputs: Batch) -> Tensor | None:
    """Return the input of the model's `head`, or None if the logits are not simply the head's output."""
    output, hidden = _run_without(model, head, inputs)
    if output.logits is hidden:
        return hidden
    _CHANGED.add(model)
    return None


def _select(
    model: PreTrainedModel, batch: Batch, y: Tensor, head: nn.Linear | None, classify: bool, loss: Tensor | None
) -> Predictions:
    y = y if head is not None else accurate(y)
    labels = aligned_labels(model, batch, y) if classify else None
    mask = present_tokens(batch, y) if labels is None else labels != NO_LABEL
    if mask is None:
        y = y.flatten(0, -2)
    else:
        places = mask.flatten().nonzero().squeeze(1)
        y = y.flatten(0, mask.ndim - 1)[places]
        labels = None if labels is None else labels.flatten()[places]
    if not len(y):
        raise ValueError("each batch must ask for a prediction, but one has no label or no next token")
    return Predictions(y, head, labels, classify, loss)


def accurate(y: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if it has that."""
    return y if y.element_size() == 8 else y.float()


def main_output(output: Any) -> Tensor:
    """Return the logits of a model's output, or the hidden states of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if name in output:
            return output[name]
    raise ValueError(f"a model must put out logits or last_hidden_state, but this one puts out {', '.join(output)}")


def aligned_labels(model: PreTrainedModel, batch: Batch, logits: Tensor) -> Tensor | None:
    """Return the labels aligned with the logits (shifted for next-token models), None for a batch without classes as
    labels."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
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
    """Return a language model's batch with its tokens as labels, if it has tokens and no labels. Padding gets no label,
    and neither does a token after it, as a missing token predicts nothing."""
    if "labels" in batch or "input_ids" not in batch or not predicts_next(model):
        return batch
    # models take int32 tokens too, unlike torch's loss
    labels, mask = batch["input_ids"].long(), batch.get("attention_mask")
    if mask is not None:
        present = mask != 0
        labels = labels.masked_fill(~(present & F.pad(present, (1, -1))), NO_LABEL)
    return {**batch, "labels": labels}
