"""A model is saved as a folder with config.json and model.safetensors, as our transformers class does, and a file that
tells transformers where that class is. No pickle."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from linattn.files import atomic_file, safetensors_library, write_tensors
from linattn.models.config import LanguageModelConfig, upgraded
from linattn.version import __version__

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
MODEL_TYPE = "linattn"
# the token that begins every document, where a tokenizer has a name for it
SEPARATOR = "<|document|>"
ARCHITECTURE = "LinattnForCausalLM"
# transformers finds the classes of a folder in a file of the folder, where the user trusts it
LOADER = "linattn_classes.py"
CLASSES = {
    "AutoConfig": "LinattnConfig",
    "AutoModel": "LinattnModel",
    "AutoModelForCausalLM": "LinattnForCausalLM",
    "AutoModelForSequenceClassification": "LinattnForSequenceClassification",
    "AutoModelForTokenClassification": "LinattnForTokenClassification",
}
_INTEGRATION = "linattn.integrations.transformers"
AUTO_MAP = {auto: f"{LOADER.removesuffix('.py')}.{own}" for auto, own in CLASSES.items()}
# transformers' class holds the model as its attribute of this name
PREFIX = "model."


def write_model(
    folder: str | os.PathLike[str], config: LanguageModelConfig, tensors: Mapping[str, Shaped[Tensor, "..."]]
) -> None:
    """Write the weights, the configuration and the loader. Where there is a configuration, the weights are complete."""
    # a missing package is an error before there is a folder
    safetensors_library()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "auto_map": AUTO_MAP,
        "linattn_version": __version__,
        "language_model": config.to_dict(),
    }
    weights = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # the weights are last in and first out: a folder with a configuration is a folder with a model
    with atomic_file(folder / CONFIG) as config_file, atomic_file(folder / WEIGHTS) as weights_file:
        config_file.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        write_tensors(weights, weights_file, {"format": "pt"})
        write_loader(folder)


def write_loader(folder: Path) -> None:
    """Write the file by which transformers finds our classes with `trust_remote_code=True`, if linattn is installed."""
    names = ", ".join(CLASSES.values())
    text = f'"""Lets transformers load this folder: pip install linattn"""\n\nfrom {_INTEGRATION} import {names}\n'
    with atomic_file(folder / LOADER) as file:
        file.write_text(text, encoding="utf-8")


def read_tensors(
    folder: str | os.PathLike[str], expected: Mapping[str, Shaped[Tensor, "..."]]
) -> dict[str, Shaped[Tensor, "..."]]:
    """Return the weights of a saved model, which must have the expected names and shapes."""
    library, path = safetensors_library(), Path(folder) / WEIGHTS
    tensors = _read(path, library.torch.load_file, library.SafetensorError)
    _check_tensors({PREFIX + name: tensor for name, tensor in expected.items()}, tensors, path)
    # copies, or the weights would be views of a file that someone may write to
    return {name.removeprefix(PREFIX): tensor.clone() for name, tensor in tensors.items()}


def read_config(folder: str | os.PathLike[str]) -> LanguageModelConfig:
    """Return the configuration of a saved model without reading its weights."""
    path = Path(folder) / CONFIG
    # what is not JSON and what is not UTF-8 is a ValueError
    fields = _read(path, lambda path: json.loads(path.read_text(encoding="utf-8")), ValueError)
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is corrupt: it holds a {type(fields).__name__} and no object")
    if fields.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{path} is not of a linattn model: its model_type is {fields.get('model_type')!r}")
    check_version(fields.get("linattn_version"), path)
    if not isinstance(fields.get("language_model"), dict):
        raise ValueError(f"{path} has no language_model, the model's configuration")
    try:
        return LanguageModelConfig.from_dict(upgraded(fields["language_model"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_version(version: Any, path: Path) -> None:
    """Raise ValueError if a later version of linattn wrote the model, whose configuration is at `path`."""
    try:
        writer, own = ([int(part) for part in text.split(".")[:2]] for text in (str(version), __version__))
    except ValueError as error:
        raise ValueError(f"{path} has no valid linattn_version, but {version!r}") from error
    if writer > own:
        raise ValueError(f"{path} was written by linattn {version}, but this is {__version__}: a newer one is needed")


def _read(path: Path, load: Callable[[Path], Any], corrupt: type[Exception]) -> Any:
    try:
        return load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no model in {path.parent}: {path.name} is missing") from error
    except corrupt as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def _check_tensors(expected: dict[str, Tensor], tensors: dict[str, Tensor], path: Path) -> None:
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not of this model" for name in tensors if name not in expected]
    for name, expected_tensor in expected.items():
        tensor = tensors.get(name, expected_tensor)
        if tensor.shape != expected_tensor.shape:
            problems.append(f"{name} is {tuple(tensor.shape)} and must be {tuple(expected_tensor.shape)}")
        elif tensor.is_floating_point() != expected_tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype} and must be {expected_tensor.dtype}")
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{path} does not fit its configuration: {'; '.join(problems[:5])}{more}")
