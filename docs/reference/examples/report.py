import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import Report, convert, plan, report

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
batches = [{"input_ids": torch.randint(256, (2, 64))}]
conversion = convert(model, plan(model, batches[0]), batches)
found: Report = report(model, conversion.teacher, batches)
print(list(found.scores))  # ['teacher', 'linear', 'window alone', 'linear part off', 'uniform attention']
