import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import LinearizedAttention, convert, plan

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
batches = [{"input_ids": torch.randint(256, (2, 64))}]
conversion = convert(model, plan(model, batches[0]), batches)
own: LinearizedAttention = model.model.layers[0].self_attn.linear_attention
print(own.spec.method, own.spec.window)  # taylor2 32
