"""Models with a norm on the output of each head, in half precision: close to float32, trained under a loss scale."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from linattn import LanguageModel, LanguageModelConfig, named_attention
from linattn.attention.named import ATTENTIONS
from linattn.nn.norms import HEAD_NORM_EPS

# GradScaler's first
SCALE = 2.0**16
LAYERS = {
    "norm": {"head_norm": True},
    "layer of the papers": {"head_norm": True, "gate": True, "convolution": 4, "convolution_on": "projections"},
}


def is_gated(name: str) -> bool:
    """A state that fades or is corrected has no form without an order of tokens."""
    try:
        named_attention(name, num_heads=4, head_dim=16, max_length=9)
    except ValueError:
        return True
    return False


every_gated_method = pytest.mark.parametrize("name", [name for name in ATTENTIONS if is_gated(name)])
every_layer = pytest.mark.parametrize("layer", LAYERS)


def model(name: str, layer: str, dim: int, depth: int, eps: float = HEAD_NORM_EPS) -> LanguageModel:
    sizes = {"vocab_size": 257, "dim": dim, "depth": depth, "num_heads": 4}
    options = {"rotary": None, "head_norm_eps": eps, **LAYERS[layer]}
    return LanguageModel(LanguageModelConfig(attention=name, **sizes, **options))


@every_gated_method
@every_layer
@pytest.mark.parametrize(("dim", "depth"), [(64, 2), (256, 4)])
def test_logits_in_bfloat16_are_those_of_float32(name: str, layer: str, dim: int, depth: int) -> None:
    rounded, tokens = model(name, layer, dim, depth).bfloat16(), torch.randint(257, (1, 256))
    with torch.no_grad():
        logits = rounded(tokens).float()
        expected = rounded.float()(tokens)
    assert (logits - expected).norm() < 0.02 * expected.norm()


@every_gated_method
@every_layer
def test_gradients_in_float16_are_finite_under_the_first_loss_scale(name: str, layer: str) -> None:
    scaled, tokens = model(name, layer, 64, 2), torch.randint(257, (4, 256))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = scaled(tokens)
    (SCALE * cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())).backward()
    assert all(weight.grad.isfinite().all() for weight in scaled.parameters() if weight.grad is not None)
