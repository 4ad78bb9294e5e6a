import contextlib

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from linattn.integrations.transformers import speed_up

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1}
model = Mamba2ForCausalLM(Mamba2Config(vocab_size=257, **sizes)).eval()
tokens = torch.randint(256, (1, 100))
with torch.no_grad(), contextlib.redirect_stdout(None):  # it prints what it did
    before = model(tokens).logits
    record = speed_up(model)
    after = model(tokens).logits
print(torch.allclose(after, before, atol=1e-5))  # True
print(record.replaced["backbone.layers.0.mixer"])  # mamba2_chunk_scan by causal_linear_attention
