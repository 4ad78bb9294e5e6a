"""Every named attention, causal and not, where it can be both; and mixtures of heads. All have four heads of six
channels, two key heads, a window of 17 tokens, and Linformer a length of at most 256."""

import pytest
import torch
from torch import Tensor

from linattn.attention import ATTENTIONS, InnerAttention, named_attention

HEADS, KEY_HEADS, CHANNELS, WINDOW, LONGEST = 4, 2, 6, 17, 256
SPECS = (*ATTENTIONS, "local+elu", "softmax:2+local_bucketed:2")
# a new attention that can only be one of them fails here until it is listed
ONLY_CAUSAL = {"retention"}
NEVER_CAUSAL = {"linformer", "linformer_mean", "linformer_conv"}

CAUSAL = [(spec, True) for spec in SPECS if spec not in NEVER_CAUSAL]
GLOBAL = [(spec, False) for spec in SPECS if spec not in ONLY_CAUSAL]


def over(cases: list[tuple[str, bool]]) -> pytest.MarkDecorator:
    ids = [f"{spec}-{'causal' if causal else 'all'}" for spec, causal in cases]
    return pytest.mark.parametrize(("spec", "causal"), cases, ids=ids)


every_attention = over(CAUSAL + GLOBAL)
every_causal = pytest.mark.parametrize("spec", [spec for spec, _ in CAUSAL])


def make(spec: str, causal: bool, *, window: int = WINDOW) -> InnerAttention:
    """In float64. Convolutions start as means, so their weights are drawn, to be told apart."""
    inner = named_attention(
        spec,
        num_heads=HEADS,
        num_key_heads=KEY_HEADS,
        head_dim=CHANNELS,
        causal=causal,
        window=window,
        max_length=LONGEST,
    ).double()
    with torch.no_grad():
        for weight in inner.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return inner.eval()


def heads(n: int, m: int | None = None, *, b: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    m = n if m is None else m
    k, v = torch.randn(2, b, KEY_HEADS, m, CHANNELS, dtype=torch.float64)
    return torch.randn(b, HEADS, n, CHANNELS, dtype=torch.float64), k, v
