"""The checks of the sweep: what must hold for a stock model that attends by our methods."""

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from .inputs import LENGTH, Subject, inputs
from .outputs import Pairs, bfloat16_calls, output

SOFTMAX, ELU = "linattn:softmax", "linattn:elu"
# changes of the weights, as shares of their size: larger ones may move a token to another expert
STEPS = (1e-6, 1e-7, 1e-5)
SLOPE = 1e-5
"""The relative error of differences of the loss."""


def padded(subject: Subject, side: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs with padding, and which tokens are present."""
    made = inputs(subject)
    place = torch.arange(LENGTH)
    lengths = torch.tensor([[4], [10], [LENGTH]])
    mask = place < lengths if side == "right" else place >= LENGTH - lengths
    # CLIP takes the output at the highest number of a token
    made["input_ids"] = made["input_ids"].masked_fill(~mask, 3)
    made["attention_mask"] = mask.long()
    if "position_ids" in inspect.signature(subject.model.forward).parameters and subject.kind == "decoder":
        made["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return made, mask


def same(subject: Subject) -> Tensor:
    return output(subject.model, **inputs(subject))


def left(subject: Subject) -> Tensor:
    return _padded_output(subject, "left")


def right(subject: Subject) -> Tensor:
    return _padded_output(subject, "right")


def _padded_output(subject: Subject, side: str) -> Tensor:
    made, mask = padded(subject, side)
    y = output(subject.model, **made)
    return y if subject.model.config.is_encoder_decoder or y.shape[:2] != mask.shape else y[mask]


def packed(subject: Subject) -> Tensor:
    places = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(3, -1)
    return output(subject.model, **inputs(subject), position_ids=places)


def cut(subject: Subject) -> Tensor:
    ids, cache = inputs(subject)["input_ids"], DynamicCache(config=subject.model.config)
    return torch.cat([subject.model(input_ids=x, cache=cache).logits for x in ids.split((5, 1, 5), 1)], 1)


def generate(subject: Subject, **options: Any) -> Tensor:
    made = inputs(subject)
    made.pop("decoder_input_ids", None)
    if "input_ids" in made:
        made["attention_mask"] = torch.ones_like(made["input_ids"])
    torch.manual_seed(0)
    result = subject.model.generate(**made, max_new_tokens=5, min_new_tokens=5, do_sample=False, **options)
    return result if isinstance(result, Tensor) else result[0]


def gradients(subject: Subject) -> list[Tensor]:
    """Return the gradients of all weights, as shares of the largest."""
    found = torch.autograd.grad(*loss(subject), materialize_grads=True)
    if not all(x.isfinite().all() for x in found):
        raise FloatingPointError("a gradient is not finite")
    largest = max(x.abs().max() for x in found)
    return [x / largest for x in found]


@torch.enable_grad()
def loss(subject: Subject) -> tuple[Tensor, list[Tensor]]:
    """Return a random combination of the outputs, and the weights that it depends on."""
    y = same(subject)
    factors = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return (y * factors).mean(), [x for x in subject.model.parameters() if x.requires_grad and x.numel()]


COMPARISONS: dict[str, Callable[[Subject], Tensor | list[Tensor]]] = {
    "softmax": same,
    "gradients": gradients,
    "left": left,
    "right": right,
    "packed": packed,
    "cut": cut,
    "generate": generate,
}
"""What `linattn:softmax` computes as the model's own attention does."""


def future(subject: Subject) -> Pairs:
    made = inputs(subject)
    name = "decoder_input_ids" if "decoder_input_ids" in made else "input_ids"
    before = output(subject.model, **made)
    made[name] = made[name].clone()
    made[name][:, -2:] = (made[name][:, -2:] + 1) % 40 + 3
    after = output(subject.model, **made)
    n = made[name].shape[1]
    assert before.shape[1] == n
    return [(after[:, : n - 2], before[:, : n - 2])]


def pieces(subject: Subject) -> Pairs:
    return [(cut(subject), same(subject))]


def padding(subject: Subject) -> Pairs:
    pairs = []
    # with other positions the features of rotated queries and keys are others
    for side in ("left", "right") if "position_ids" in padded(subject, "left")[0] else ("right",):
        made, mask = padded(subject, side)
        whole = output(subject.model, **made)
        for row, present in enumerate(mask):
            single = {key: x[row][present][None] for key, x in made.items() if key in ("input_ids",)}
            others = {key: x[row][None] for key, x in made.items() if x.shape[1:] != mask.shape[1:]}
            alone = output(subject.model, **single, **others)[0]
            pairs.append((whole[row][present] if alone.shape[0] == present.sum() else whole[row], alone))
    return pairs


def documents(subject: Subject) -> Pairs:
    ids = inputs(subject)["input_ids"]
    separate = [output(subject.model, input_ids=part) for part in ids.split((4, LENGTH - 4), 1)]
    return [(packed(subject), torch.cat(separate, 1))]


def cache(subject: Subject) -> Pairs:
    pairs = [(generate(subject), generate(subject, use_cache=False))]
    beams = {"num_beams": 2}
    return [*pairs, (generate(subject, **beams), generate(subject, **beams, use_cache=False))]


def folder(subject: Subject) -> Pairs:
    with tempfile.TemporaryDirectory() as path:
        subject.model.save_pretrained(path)
        name = subject.model.config._attn_implementation
        loaded = type(subject.model).from_pretrained(path, attn_implementation=name, dtype=torch.float64)
    loaded.config._experts_implementation = subject.model.config._experts_implementation
    made = inputs(subject)
    return [(output(loaded.eval(), **made), output(subject.model, **made))]


def slope(subject: Subject) -> Pairs:
    """Compare the gradients with differences of the loss, along a random direction in which all weights change."""
    with Float64():
        return [_slope(subject, set(subject.model.parameters()))]


def attention_slope(subject: Subject) -> Pairs:
    """Compare the gradients with differences of the loss, along a random direction in which only the weights of
    attention modules change."""
    modules = [module for module in subject.model.modules() if hasattr(module, "is_causal")]
    with Float64():
        return [_slope(subject, {weight for module in modules for weight in module.parameters()})]


class Float64(TorchFunctionMode):
    """Compute in float64 what a model computes in float32, such as norms: rounding there would hide small slopes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        options = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **options)


def _slope(subject: Subject, changing: set[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the slope of the loss by the gradients, and by the first differences that agree, else by the closest."""
    value, all_weights = loss(subject)
    weights = [weight for weight in all_weights if weight in changing]
    if not weights:
        raise ValueError("no weights belong to attention modules")
    gradients = torch.autograd.grad(value, weights, materialize_grads=True)
    before = [weight.detach().clone() for weight in weights]
    generator = torch.Generator().manual_seed(2)
    ways = [x.abs().mean() * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in before]
    along = torch.stack([(x * way).sum() for x, way in zip(gradients, ways, strict=True)]).sum()

    def moved(step: float) -> Tensor:
        for weight, x, way in zip(weights, before, ways, strict=True):
            weight.copy_(x + step * way)
        return loss(subject)[0].detach()

    slopes: list[Tensor] = []
    try:
        for step in STEPS:
            slopes.append((moved(step) - moved(-step)) / (2 * step))
            if (along - slopes[-1]).abs() < SLOPE * slopes[-1].abs():
                break
    finally:
        for weight, x in zip(weights, before, strict=True):
            weight.copy_(x)
    return along, min(slopes, key=lambda slope: (along - slope).abs().nan_to_num(torch.inf))


LAWS: dict[str, Callable[[Subject], Pairs]] = {
    "future": future,
    "pieces": pieces,
    "padding": padding,
    "documents": documents,
    "cache": cache,
    "folder": folder,
    "slope": slope,
    "attention slope": attention_slope,
    "bfloat16 calls": bfloat16_calls,
}
"""What holds for `linattn:elu` wherever it holds for the model's own attention."""


def applies(check: str, subject: Subject) -> bool:
    """Return whether the check is about models of this kind."""
    if check in ("packed", "cut", "pieces", "documents"):
        return subject.kind in ("decoder", "image and text") and not subject.model.config.is_encoder_decoder
    if check in ("generate", "cache"):
        return subject.generates
    if check == "future":
        return subject.kind != "other"
    if check in ("left", "right", "padding"):
        return "input_ids" in inputs(subject)
    return True
