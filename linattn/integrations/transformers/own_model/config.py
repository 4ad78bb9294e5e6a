"""Our configuration inside one of transformers': `language_model`, a plain dict, and the usual names for its fields."""

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, no_type_check

from transformers import PreTrainedConfig

from linattn.models import LanguageModelConfig
from linattn.models.config import upgraded
from linattn.models.storage import AUTO_MAP, MODEL_TYPE, check_version, write_loader
from linattn.version import __version__


def _language_models(field: str) -> property:
    """Return a property that reads a field of the language model's configuration."""
    return property(lambda config: getattr(config.to_language_model(), field))


class NotCopied:
    """Keeps transformers from copying our source into each folder that a model loaded from a folder is saved to."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing."""


# jaxtyping's hook for tests takes this for a plain dataclass, whose constructor takes only these fields
@no_type_check
class LinattnConfig(NotCopied, PreTrainedConfig):
    """`language_model` is a LanguageModelConfig or its fields, `linattn_version` the version that wrote the file: a
    newer one than this raises ValueError. All else is transformers' own: `use_cache` returns the state, and
    `pad_token_id`, `bos_token_id` and `eos_token_id` are the tokens that pad, begin and end a text.

    The fields of `language_model` raise ValueError elsewhere: transformers would store `LinattnConfig(depth=2)` as an
    attribute without effect."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar = ["cache"]

    language_model: dict[str, Any] | LanguageModelConfig | None = None
    linattn_version: str | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.linattn_version is not None:
            check_version(self.linattn_version, Path("config.json"))
            if isinstance(self.language_model, dict):
                self.language_model = upgraded(self.language_model)
        self.linattn_version = __version__
        if not isinstance(self.language_model, (LanguageModelConfig, dict)):
            raise ValueError("LinattnConfig needs language_model: a LanguageModelConfig or its fields as a dict")
        self.language_model = self.to_language_model().to_dict()
        self.auto_map = dict(AUTO_MAP)
        misplaced = [field.name for field in dataclasses.fields(LanguageModelConfig) if field.name in kwargs]
        if misplaced:
            raise ValueError(f"{', '.join(misplaced)} must be given inside language_model, not beside it")
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write config.json, and the file by which transformers finds our classes where they were not imported."""
        super().save_pretrained(save_directory, *args, **kwargs)
        write_loader(Path(save_directory))

    def to_language_model(self) -> LanguageModelConfig:
        fields = self.language_model
        return fields if isinstance(fields, LanguageModelConfig) else LanguageModelConfig.from_dict(fields or {})

    @property
    def vocab_size(self) -> int:
        return self.to_language_model().vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        # transformers sets it when it resizes the embeddings
        self.language_model = dataclasses.replace(self.to_language_model(), vocab_size=value).to_dict()

    hidden_size = _language_models("dim")
    intermediate_size = _language_models("hidden_dim")
    num_hidden_layers = _language_models("depth")
    num_attention_heads = _language_models("num_heads")
    tie_word_embeddings = _language_models("tie_embeddings")

    @property
    def num_key_value_heads(self) -> int:
        model = self.to_language_model()
        return model.num_heads if model.num_key_heads is None else model.num_key_heads

    @property
    def max_position_embeddings(self) -> int:
        longest = self.to_language_model().max_length
        if longest is None:
            # transformers calls hasattr to see whether a model has a longest sequence
            raise AttributeError("this model has no longest sequence")
        return longest
