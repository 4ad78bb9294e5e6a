"""Our language model for transformers (`own_model`), our attention in its stock models (`stock_attention`), and our
scans in its hybrid models (`hybrids`).

Importing this registers the model with transformers' Auto classes and with PEFT, and the attention by name."""

import torch

from linattn.checks import extra

OLDEST = "5.24"
"""The first version of transformers whose models take their cache as `cache`."""

with extra("transformers"):
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(OLDEST):
        raise ImportError(
            f"linattn needs transformers {OLDEST} or later, but {transformers.__version__} is installed: "
            'pip install "linattn[transformers]" installs a newer one'
        )
    from linattn.integrations.transformers import held_states
    from linattn.integrations.transformers.hybrids.speed_up import SpeedUp, speed_up
    from linattn.integrations.transformers.own_model.cache import LinattnCache
    from linattn.integrations.transformers.own_model.config import LinattnConfig
    from linattn.integrations.transformers.own_model.heads import (
        LinattnForCausalLM,
        LinattnForSequenceClassification,
        LinattnForTokenClassification,
    )
    from linattn.integrations.transformers.own_model.lora import register_target_modules
    from linattn.integrations.transformers.own_model.model import LinattnModel
    from linattn.integrations.transformers.own_model.stateful_trainer import StatefulTrainer
    from linattn.integrations.transformers.own_model.tokenizer import (
        byte_tokenizer,
        file_tokenizer,
        save_for_transformers,
    )
    from linattn.integrations.transformers.stock_attention.hooks import attended_modules, install, register_attention
    from linattn.models.storage import CLASSES, MODEL_TYPE

__all__ = [
    "LinattnCache",
    "LinattnConfig",
    "LinattnForCausalLM",
    "LinattnForSequenceClassification",
    "LinattnForTokenClassification",
    "LinattnModel",
    "SpeedUp",
    "StatefulTrainer",
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
held_states.register()
# not every build of torch has it
if torch.distributed.is_available():
    from linattn.integrations.transformers import sharded_sequence

    sharded_sequence.register()
