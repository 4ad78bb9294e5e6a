"""Small models of every kind for these tests, with weights large enough that each part of them shows in the logits."""

import pytest
import torch

from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM
from linattn.models import LanguageModelConfig

SIZE = {"vocab_size": 31, "dim": 32, "depth": 2, "num_heads": 4, "window": 5}
MODELS = {
    "elu": {"attention": "elu", "num_key_heads": 2},
    "local+elu": {"attention": "local+elu", "convolution": 3},
    "softmax": {"attention": "softmax", "rotary": None, "positions": "learned", "max_length": 80},
    "favor": {"attention": "favor", "convolution": 4, "norm": "layer", "feed_forward": "gelu"},
    "retention": {"attention": "retention", "head_norm": True, "gate": True},
    "gated_delta": {"attention": "gated_delta", "convolution": 3, "convolution_on": "projections", "head_norm": True},
    "layers": {"attention": ("convolution:3", "local+hedgehog"), "tie_embeddings": False},
}

every_model = pytest.mark.parametrize("name", MODELS)


def config(name: str, **changes) -> LinattnConfig:
    return LinattnConfig(language_model=LanguageModelConfig(**{**SIZE, **MODELS[name], **changes}))


def make(name: str, dtype: torch.dtype = torch.float64, **changes) -> LinattnForCausalLM:
    model = LinattnForCausalLM(config(name, **changes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return model.to(dtype).eval()


def prompts(b: int = 3, n: int = 9) -> torch.Tensor:
    return torch.randint(1, SIZE["vocab_size"], (b, n))


def left_padded(rows: list[list[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask
