import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import Budget, convert, plan, transfer

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
batches = [{"input_ids": torch.randint(256, (2, 64))}]
conversion = convert(model, plan(model, batches[0]), batches)
seen = []
transfer(model, conversion.teacher, batches, Budget(steps=3, report=seen.append))
print([progress.step for progress in seen])  # [1, 2, 3]
