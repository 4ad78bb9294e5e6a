import torch

from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM

config = LinattnConfig(language_model={"vocab_size": 257, "dim": 32, "depth": 2})
model = LinattnForCausalLM(config).eval()
print(model.generate(torch.randint(256, (1, 10)), max_new_tokens=5, do_sample=False).shape)  # torch.Size([1, 15])
