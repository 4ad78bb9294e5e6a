import contextlib

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from linattn.integrations.transformers import SpeedUp, speed_up

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1}
model = Mamba2ForCausalLM(Mamba2Config(vocab_size=257, **sizes)).eval()
tokens = torch.randint(256, (1, 100))
with torch.no_grad(), contextlib.redirect_stdout(None):
    before = model(tokens).logits
    record = speed_up(model)
    record.undo()
print(type(record) is SpeedUp, torch.equal(model(tokens).logits, before))  # True True
print(record.kept)  # {'mamba2_selective_state_update': "decoding steps stay transformers' own, which are fast"}
