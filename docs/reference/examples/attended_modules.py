import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linattn.integrations.transformers import attended_modules

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)).eval()
model.set_attn_implementation("linattn:local+elu")
print(attended_modules(model, input_ids=torch.randint(256, (1, 10))))  # ['model.layers.0.self_attn']
