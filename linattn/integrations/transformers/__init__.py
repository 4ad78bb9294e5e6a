"""Our language model for transformers: importing this registers it with AutoConfig and AutoModelForCausalLM."""

from transformers import AutoConfig, AutoModelForCausalLM

from linattn.integrations.transformers.cache import LinattnCache
from linattn.integrations.transformers.config import LinattnConfig
from linattn.integrations.transformers.model import LinattnForCausalLM

__all__ = ["LinattnCache", "LinattnConfig", "LinattnForCausalLM"]

AutoConfig.register(LinattnConfig.model_type, LinattnConfig, exist_ok=True)
AutoModelForCausalLM.register(LinattnConfig, LinattnForCausalLM, exist_ok=True)
