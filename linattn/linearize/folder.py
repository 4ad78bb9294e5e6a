"""The folder of a linearized model: as transformers writes it, with a description of the layers in config.json, their
weights beside the others, and a Python file from which transformers gets the class of the model."""

import functools
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from linattn.checks import check_types
from linattn.integrations.transformers.own_model.config import NotCopied
from linattn.integrations.transformers.weight_files import finish_weights
from linattn.linearize.attention import LayerSpec, LinearizedAttention, attach, linearized_layers, own_attention
from linattn.linearize.calls import SOFTMAX
from linattn.models.storage import check_version
from linattn.version import __version__

FIELD = "linear_attention"
"""The field of a configuration that describes the linearized layers."""
LOADER = "linattn_linearized.py"
# every stock class checks this field, and unlike attn_implementation few callers set it
CHECKED = "experts_implementation"
REFUSAL = "linearized by linattn: load it with trust_remote_code=True"
"""The value of the checked field, which makes stock classes raise an error with these words."""


class Linearized(NotCopied, PreTrainedModel):
    """Adds the linearized layers that the configuration describes to a stock class, with which `linearized_class`
    combines it. Other arguments and options are those of the stock class."""

    stock: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig, *args: Any, **options: Any):
        _check_implementation(config._attn_implementation, None)
        config._attn_implementation = SOFTMAX
        if config._experts_implementation == REFUSAL:
            config._experts_implementation = None
        super().__init__(config, *args, **options)
        setattr(config, CHECKED, REFUSAL)
        description = getattr(config, FIELD)
        check_version(description["linattn_version"], Path("config.json"))
        for name, spec in description["layers"].items():
            attach(self.get_submodule(_own_name(self, name)), LinearizedAttention(LayerSpec(**spec)))

    def __reduce__(self) -> Any:
        """Pickle as the stock class: this class is made at run time and cannot be imported."""
        return _empty, (type(self).__name__,), self.__dict__

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **options: Any) -> None:
        """Raise ValueError unless the function is our softmax: others would not use the linearized layers' weights."""
        _check_implementation(attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **options)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        """Write the folder, with the file from which transformers gets the class."""
        super().save_pretrained(save_directory, *args, **options)
        self._write_loader(Path(save_directory))
        finish_weights(Path(save_directory))

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        # save_pretrained uploads what is newer than its call, before it returns
        self._write_loader(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **options)

    def _write_loader(self, folder: Path) -> None:
        classes = sorted({reference.partition(".")[2] for reference in self.config.auto_map.values()})
        text = '"""Lets transformers load this folder: pip install linattn"""\n\n'
        text += "from linattn.linearize import linearized_class\n\n"
        text += "".join(f'{name} = linearized_class("{name}")\n' for name in classes)
        (folder / LOADER).write_text(text, encoding="utf-8")


@check_types
@functools.cache
def linearized_class(name: str) -> type[Linearized]:
    """Return the stock class of transformers with this name, for configurations with linearized layers."""
    stock = getattr(transformers, name, None)
    if not isinstance(stock, type) or not issubclass(stock, PreTrainedModel):
        raise ValueError(f"{name!r} is not a model of transformers {transformers.__version__}")
    # the stock name is what config.json calls the architecture, and the module is where transformers looks for source
    return cast(type[Linearized], type(name, (Linearized, stock), {"stock": stock, "__module__": stock.__module__}))


def _empty(name: str) -> Linearized:
    """Return an object of the class without attributes, for pickle to fill."""
    kind = linearized_class(name)
    return kind.__new__(kind)


@check_types
def load_linearized(folder: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """Load a linearized model with the class that saved it; the options are those of `from_pretrained`.

    `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`, and so on, do the same. Without this
    argument transformers raises ValueError."""
    settings, _ = PreTrainedConfig.get_config_dict(folder, **options)
    if settings.get(FIELD) is None:
        raise ValueError(f"{folder} is not of a linearized model: its config.json has no {FIELD}")
    return linearized_class((settings.get("architectures") or ["?"])[0]).from_pretrained(folder, **options)


def describe(model: PreTrainedModel, stock: PreTrainedConfig) -> None:
    """Set the model's class and the description in its configuration to those for the linearized layers that it has
    now: without any, the stock class and the fields of the `stock` configuration."""
    layers = {name: asdict(own_attention(module).spec) for name, module in linearized_layers(model).items()}
    if layers:
        model.__class__ = linearized_class(type(model).__name__)
        setattr(model.config, FIELD, {"linattn_version": __version__, "layers": layers})
        setattr(model.config, CHECKED, REFUSAL)
        model.config.auto_map = _auto_map(model.config)
    elif isinstance(model, Linearized):
        kind: Any = model.stock
        model.__class__ = kind
        for field in (FIELD, CHECKED, "auto_map"):
            delattr(model.config, field)
            if field in vars(stock):
                setattr(model.config, field, vars(stock)[field])


def check_stock(model: PreTrainedModel) -> None:
    """Raise ValueError unless the model's class is one of transformers, which a folder can name."""
    kind = type(model)
    if getattr(transformers, kind.__name__, None) is not kind:
        raise ValueError(f"{kind.__name__} is not a class of transformers itself, so a saved folder could not name it")


def _check_implementation(implementation: Any, *others: str | None) -> None:
    """Raise ValueError unless the attention function is our softmax or one of the others."""
    if implementation not in (SOFTMAX, *others):
        raise ValueError(
            f"attn_implementation {implementation!r}: a linearized model's attention is its own, and what stayed "
            "softmax runs beside it: undo the conversion first"
        )


def _auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """Return config.json's "auto_map": for each of transformers' Auto classes that knows the configuration, by name,
    the class in the file `LOADER` that it loads."""
    classes = {}
    for auto, kind in vars(modeling_auto).items():
        mapping = getattr(kind, "_model_mapping", None)
        if isinstance(kind, type) and mapping is not None and type(config) in mapping:
            model = mapping[type(config)]
            model = model[0] if isinstance(model, tuple) else model
            classes[auto] = f"{LOADER.removesuffix('.py')}.{model.__name__}"
    return classes


def _own_name(model: PreTrainedModel, name: str) -> str:
    """Return the name in `model` of the module that has this `name` in the saved model. `model` may be the saved
    model's base model, or the saved model may be that of `model`."""
    known, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    return next((name for name in (name, name.removeprefix(prefix), prefix + name) if name in known), name)
