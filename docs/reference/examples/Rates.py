import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import Budget, Rates, convert, plan, transfer

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
batches = [{"input_ids": torch.randint(256, (2, 64))}]
conversion = convert(model, plan(model, batches[0]), batches)
before = model.model.layers[0].self_attn.q_proj.weight.clone()
transfer(model, conversion.teacher, batches, Budget(steps=2), rates=Rates(stock=0.0, new=1e-2, hidden=0.0))
print(torch.equal(model.model.layers[0].self_attn.q_proj.weight, before))  # True
