import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import Choice, choose_layers, convert, plan

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
batches = [{"input_ids": torch.randint(256, (2, 64))}]
conversion = convert(model, plan(model, batches[0]), batches)
choice: Choice = choose_layers(model, conversion.teacher, batches, 1)
print(min(choice.restored, key=choice.restored.get) in choice.kept)  # True
