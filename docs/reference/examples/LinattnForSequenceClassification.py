import torch

from linattn.integrations.transformers import LinattnConfig, LinattnForSequenceClassification

config = LinattnConfig(
    language_model={"vocab_size": 257, "dim": 32, "depth": 2, "attention": "elu", "causal": False}, num_labels=3
)
model = LinattnForSequenceClassification(config).eval()
print(model(torch.randint(256, (2, 50))).logits.shape)  # torch.Size([2, 3])
