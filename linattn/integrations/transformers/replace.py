"""One attention by name for all models of transformers inside a model."""

from torch import nn
from transformers import PreTrainedModel

from linattn.integrations.transformers.hooks import register_attention


def set_attention(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """Set `attn_implementation="linattn:" + method` in each; return the modules that attend, by name."""
    name = register_attention(method)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation(name)
    return {
        name: module for name, module in model.named_modules() if isinstance(getattr(module, "is_causal", None), bool)
    }
