from transformers import LlamaForCausalLM

from linattn.linearize import linearized_class

kind = linearized_class("LlamaForCausalLM")
print(issubclass(kind, LlamaForCausalLM))  # True
