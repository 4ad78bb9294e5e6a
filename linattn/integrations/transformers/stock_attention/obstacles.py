"""The models of transformers whose attention a method of ours cannot replace, and the reasons."""

import re

from transformers import PreTrainedConfig, PreTrainedModel

# their layers look the class of their attention up by the name of the implementation, and ours has no such class
_VISION_WITH_OWN_ATTENTION = re.compile(r"(.*_)?sam(_hq)?_vision_model")


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError if linattn's attention cannot replace that of the model."""
    reason = _obstacle(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} {reason}, so linattn's cannot replace it")


def keeps_own_attention(model: PreTrainedModel) -> bool:
    """Return whether the model, a part of others, always attends by its own functions."""
    return _VISION_WITH_OWN_ATTENTION.fullmatch(model.config.model_type) is not None


def _obstacle(model: PreTrainedModel) -> str | None:
    config = model.config
    if not model._can_set_attn_implementation() or config.model_type == "git":
        return (
            "computes its attention without transformers' AttentionInterface (as models with alibi or relative "
            "positions and some older ones do)"
        )
    if any("indexed_attention" in (getattr(each, "layer_types", None) or ()) for each in _all_configs(config)):
        return "attends to keys that an index chooses for each query"
    if config.model_type == "nllb-moe" and not config.router_ignore_padding_tokens:
        return "lets its experts read the mask of its own attention (unless router_ignore_padding_tokens=True)"
    if config.model_type == "informer" and config.attention_type == "prob":
        return 'attends by functions of its own (but with attention_type="full")'
    return None


def _all_configs(config: PreTrainedConfig) -> list[PreTrainedConfig | None]:
    return [config, *(getattr(config, name, None) for name in config.sub_configs)]
