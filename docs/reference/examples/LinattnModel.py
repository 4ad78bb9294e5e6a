import torch

from linattn.integrations.transformers import LinattnConfig, LinattnModel

config = LinattnConfig(language_model={"vocab_size": 257, "dim": 32, "depth": 2})
print(LinattnModel(config)(torch.randint(256, (2, 50))).last_hidden_state.shape)  # torch.Size([2, 50, 32])
