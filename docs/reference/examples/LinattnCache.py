import torch

from linattn.integrations.transformers import LinattnCache, LinattnConfig, LinattnForCausalLM

config = LinattnConfig(language_model={"vocab_size": 257, "dim": 32, "depth": 2})
model = LinattnForCausalLM(config).eval()
past = model(torch.randint(256, (1, 100))).cache
print(isinstance(past, LinattnCache), past.get_seq_length())  # True 100
