"""Our language model for transformers, and our attention and scans for its models.

Importing this registers the model with transformers' Auto classes and with PEFT, and the attention by name."""

import transformers

from linattn.integrations.transformers.cache import LinattnCache
from linattn.integrations.transformers.config import LinattnConfig
from linattn.integrations.transformers.heads import (
    LinattnForCausalLM,
    LinattnForSequenceClassification,
    LinattnForTokenClassification,
)
from linattn.integrations.transformers.hooks import attended_modules, install, register_attention
from linattn.integrations.transformers.lora import register_target_modules
from linattn.integrations.transformers.model import LinattnModel
from linattn.integrations.transformers.speed_up import SpeedUp, speed_up
from linattn.integrations.transformers.tokenizer import byte_tokenizer, file_tokenizer, save_for_transformers
from linattn.models.storage import CLASSES, MODEL_TYPE

__all__ = [
    "LinattnCache",
    "LinattnConfig",
    "LinattnForCausalLM",
    "LinattnForSequenceClassification",
    "LinattnForTokenClassification",
    "LinattnModel",
    "SpeedUp",
    "attended_modules",
    "byte_tokenizer",
    "file_tokenizer",
    "register_attention",
    "save_for_transformers",
    "speed_up",
]

for auto, own in CLASSES.items():
    key = MODEL_TYPE if auto == "AutoConfig" else LinattnConfig
    getattr(transformers, auto).register(key, globals()[own], exist_ok=True)
register_target_modules()
install()
