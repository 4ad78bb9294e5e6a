"""Random inputs for every class of transformers: which it needs follows from the signature of its `forward`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH = 11
WHISPERS = ("whisper", "qwen2_audio", "qwen2_audio_encoder")
FEATURE_SIZES = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "feature_projection_input_dim")


class Subject(NamedTuple):
    """A model, the kind of its class, the name of its own attention, "sdpa" or "eager", and a name of `VARIANTS`."""

    model: Any
    kind: str
    stock: str
    variant: str = ""

    @property
    def generates(self) -> bool:
        return self.kind != "other" and self.model.can_generate()


def inputs(subject: Subject, length: int = LENGTH) -> dict[str, Tensor]:
    """Return random inputs: three rows, of `length` tokens where the model reads tokens."""
    model, config = subject.model, subject.model.config
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype)

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
        made["input_ids"] = tokens(length)
    if config.is_encoder_decoder and "decoder_input_ids" in names:
        made["decoder_input_ids"] = tokens(length - 4)
    if "grid_thw" in names:
        made |= _grids(config, "hidden_states" if "hidden_states" in names else "pixel_values", normal)
        made |= {"merge_sizes": torch.tensor([2, 2, 2])} if "merge_sizes" in names else {}
    missing = {
        name for name, each in names.items() if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    }
    for name in (missing - made.keys()) & OTHERS.keys():
        made[name] = OTHERS[name](config, normal, made)
    return VARIANTS[subject.variant](made, config, normal)


Normal = Callable[..., Tensor]
Inputs = dict[str, Tensor]


def _with_frames(made: Inputs, config: Any, normal: Normal) -> Inputs:
    name = "pixel_values_videos" if "pixel_values_videos" in made else "pixel_values"
    frames = next((getattr(config, each) for each in ("num_frames", "frames_per_clip") if hasattr(config, each)), 2)
    return {**made, name: normal(3, frames, *_image(config))} if name in made else {}


def _without_images(made: Inputs, config: Any, normal: Normal) -> Inputs:
    return {name: x for name, x in made.items() if name != "pixel_values"} if "input_ids" in made else {}


def _transposed(made: Inputs, config: Any, normal: Normal) -> Inputs:
    return {**made, "input_features": made["input_features"].mT} if "input_features" in made else {}


def _spectrogram(made: Inputs, config: Any, normal: Normal) -> Inputs:
    size = (getattr(config, "max_length", None), getattr(config, "num_mel_bins", None))
    return {**made, "input_values": normal(3, *size)} if "input_values" in made and None not in size else {}


def _boxes(made: Inputs, config: Any, normal: Normal) -> Inputs:
    if "input_ids" not in made:
        return {}
    length = made["input_ids"].shape[1]
    # tables of places are small
    corners = (torch.arange(4 * length) % 100).view(length, 4).expand(3, -1, -1)
    return {**_without_images(made, config, normal), "bbox": corners}


VARIANTS: dict[str, Callable[[Inputs, Any, Normal], Inputs]] = {
    "": lambda made, config, normal: made,
    "videos": _with_frames,
    "texts": _without_images,
    "features first": _transposed,
    "spectrogram": _spectrogram,
    "boxes": _boxes,
}
"""Other inputs, for models that do not take the first ones. {} stands for no difference."""


OTHERS: dict[str, Callable[[Any, Normal, Inputs], Tensor]] = {
    "context_hidden_states": lambda config, normal, made: normal(3, LENGTH, config.hidden_size),
    "freq": lambda config, normal, made: torch.zeros(3, 1, dtype=torch.long),
    "hidden_states": lambda config, normal, made: normal(3, LENGTH, config.hidden_size),
    "input_features_mask": lambda config, normal, made: torch.ones(3, 40, dtype=torch.long),
    "inputs": lambda config, normal, made: normal(3, LENGTH, config.d_model),
    "inputs_embeds": lambda config, normal, made: normal(3, LENGTH, config.hidden_size),
    "noise_embeds": lambda config, normal, made: normal(3, LENGTH, config.hidden_size),
    "past_values_padding": lambda config, normal, made: torch.zeros_like(made["past_values"], dtype=torch.long),
    "pixel_attention_mask": lambda config, normal, made: torch.ones(3, 16, dtype=torch.long),
    "pixel_values_videos": lambda config, normal, made: normal(3, 2, *_image(config)),
    "qformer_input_ids": lambda config, normal, made: made["input_ids"],
    "query_embeds": lambda config, normal, made: normal(3, 4, config.hidden_size),
    "spatial_shapes": lambda config, normal, made: torch.full((3, 2), 4),
}
"""Arguments without a default value that are not the main input."""


def _grids(config: Any, name: str, normal: Normal) -> Inputs:
    """Return three images as rows of patches, and the number of patches along each side."""
    channels = next((getattr(config, each) for each in ("in_channels", "num_channels") if hasattr(config, each)), 3)
    numbers = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    return {name: normal(48, numbers), "grid_thw": torch.tensor([[1, 4, 4]] * 3)}


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
    values = normal(3, past)
    return {
        "past_values": values,
        "past_time_features": normal(3, past, features),
        "past_observed_mask": torch.ones_like(values),
        "future_values": normal(3, future),
        "future_time_features": normal(3, future, features),
    }
