"""The checks of the sweep: what must hold for a stock model that attends by our methods."""

import inspect
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

SOFTMAX, ELU = "linattn:softmax", "linattn:elu"
LENGTH = 11
WHISPERS = ("whisper", "qwen2_audio", "qwen2_audio_encoder")
FEATURE_SIZES = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "feature_projection_input_dim")
Pairs = list[tuple[Tensor, Tensor]]
"""Values of ours, and what they must equal."""


class Subject(NamedTuple):
    """A model, the kind of its class, and the name of its own attention, "sdpa" or "eager"."""

    model: Any
    kind: str
    stock: str

    @property
    def generates(self) -> bool:
        return self.kind != "other" and self.model.can_generate()


def inputs(subject: Subject, seed: int = 0) -> dict[str, Tensor]:
    """Return random inputs of three rows."""
    model, config = subject.model, subject.model.config
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def tokens(n: int) -> Tensor:
        return torch.randint(3, 40, (3, n), generator=generator)

    names, main = inspect.signature(model.forward).parameters, model.main_input_name
    made: dict[str, Tensor] = {}
    if main == "pixel_values" or (subject.kind == "other" and "pixel_values" in names):
        made["pixel_values"] = normal(3, *_image(config))
    if main == "input_features":
        made["input_features"] = normal(3, *_features(config))
    elif main == "input_values":
        made["input_values"] = normal(3, 2000)
    elif main == "past_values":
        made |= _series(config, normal)
    if "input_ids" in names and main not in ("input_features", "input_values", "past_values"):
        made["input_ids"] = tokens(LENGTH)
    if config.is_encoder_decoder and "decoder_input_ids" in names:
        made["decoder_input_ids"] = tokens(7)
    return made


def _image(config: Any) -> tuple[int, int, int]:
    parts = (getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config"))
    for each in (config, *parts):
        size, channels = getattr(each, "image_size", None), getattr(each, "num_channels", 3)
        if isinstance(size, (tuple, list)):
            return channels, size[0], size[1]
        if isinstance(size, int):
            return channels, size, size
    return 3, 32, 32


def _features(config: Any) -> tuple[int, int]:
    """Return the shape of audio features: their number and the frames in models like Whisper, else the reverse."""
    for name in (None, "audio_config", "encoder_config", "speech_encoder"):
        each = config if name is None else getattr(config, name, None)
        if getattr(each, "model_type", "") in WHISPERS or "voxtral" in getattr(each, "model_type", ""):
            return each.num_mel_bins, 2 * each.max_source_positions
        for size in FEATURE_SIZES:
            if isinstance(getattr(each, size, None), int):
                return 40, getattr(each, size)
    return 40, 8


def _series(config: Any, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    if not hasattr(config, "lags_sequence"):
        return {"past_values": normal(3, config.context_length, getattr(config, "num_input_channels", 1))}
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    features = config.num_time_features
    return {
        "past_values": normal(3, past),
        "past_time_features": normal(3, past, features),
        "past_observed_mask": torch.ones(3, past),
        "future_values": normal(3, future),
        "future_time_features": normal(3, future, features),
    }


def output(model: Any, **given: Any) -> Tensor:
    """Return the first tensor of numbers that the model returns, without a cache."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    # masks of masked autoencoders are random
    torch.manual_seed(0)
    result = model(**given)
    names = ("logits", "last_hidden_state", "logits_per_image", "image_embeds", "text_embeds")
    found = [getattr(result, name, None) for name in names]
    found += list(result.values()) if hasattr(result, "values") else list(result)
    return next(x for x in found if isinstance(x, Tensor) and x.is_floating_point())


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


def same(subject: Subject, name: str) -> Tensor:
    return output(subject.model, **inputs(subject))


def left(subject: Subject, name: str) -> Tensor:
    return _padded_output(subject, "left")


def right(subject: Subject, name: str) -> Tensor:
    return _padded_output(subject, "right")


def _padded_output(subject: Subject, side: str) -> Tensor:
    made, mask = padded(subject, side)
    y = output(subject.model, **made)
    return y if subject.model.config.is_encoder_decoder or y.shape[:2] != mask.shape else y[mask]


def packed(subject: Subject, name: str) -> Tensor:
    places = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(3, -1)
    return output(subject.model, **inputs(subject), position_ids=places)


def cut(subject: Subject, name: str) -> Tensor:
    ids, cache = inputs(subject)["input_ids"], DynamicCache(config=subject.model.config)
    return torch.cat([subject.model(input_ids=x, past_key_values=cache).logits for x in ids.split((5, 1, 5), 1)], 1)


def generate(subject: Subject, name: str, **options: Any) -> Tensor:
    made = inputs(subject)
    made.pop("decoder_input_ids", None)
    if "input_ids" in made:
        made["attention_mask"] = torch.ones_like(made["input_ids"])
    torch.manual_seed(0)
    result = subject.model.generate(**made, max_new_tokens=5, min_new_tokens=5, do_sample=False, **options)
    return result if isinstance(result, Tensor) else result[0]


COMPARISONS: dict[str, Callable[[Subject, str], Tensor]] = {
    "softmax": same,
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
    return [(cut(subject, ELU), same(subject, ELU))]


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
    return [(packed(subject, ELU), torch.cat(separate, 1))]


def cache(subject: Subject) -> Pairs:
    pairs = [(generate(subject, ELU), generate(subject, ELU, use_cache=False))]
    beams = {"num_beams": 2}
    return [*pairs, (generate(subject, ELU, **beams), generate(subject, ELU, **beams, use_cache=False))]


def folder(subject: Subject) -> Pairs:
    with tempfile.TemporaryDirectory() as path:
        subject.model.save_pretrained(path)
        name = subject.model.config._attn_implementation
        loaded = type(subject.model).from_pretrained(path, attn_implementation=name, dtype=torch.float64)
    made = inputs(subject)
    return [(output(loaded.eval(), **made), output(subject.model, **made))]


LAWS: dict[str, Callable[[Subject], Pairs]] = {
    "future": future,
    "pieces": pieces,
    "padding": padding,
    "documents": documents,
    "cache": cache,
    "folder": folder,
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
