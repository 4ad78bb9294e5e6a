import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import convert, load_linearized, plan

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
batches = [{"input_ids": torch.randint(256, (2, 64))}]
conversion = convert(model, plan(model, batches[0]), batches)
model.save_pretrained("linear")
loaded = load_linearized("linear")
with torch.no_grad():
    same = torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)
print(same)  # True
