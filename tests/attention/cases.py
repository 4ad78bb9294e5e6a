"""Every named attention, causal and not, where it can be both; and mixtures of heads. All have four heads of six
channels, two key heads, a window of 17 tokens, and Linformer a length of at most 256. Gates are functions of keys."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.attention import ATTENTIONS, Gates, InnerAttention, named_attention, traits
from linattn.attention.gates import AnyGates, AnyNeeds, SplitNeeds
from linattn.ops.numerics import accumulator

HEADS, KEY_HEADS, CHANNELS, WINDOW, LONGEST = 4, 2, 6, 17, 256
SPECS = (*ATTENTIONS, "local+elu", "softmax:2+local_bucketed:2", "local:2+gated_delta:2")
CAUSAL = [(spec, True) for spec in SPECS if traits(spec).causal]
GLOBAL = [(spec, False) for spec in SPECS if traits(spec).bidirectional]
GATED = [name for name in ATTENTIONS if traits(name).gated]
FADING = [name for name in GATED if named_attention(name, num_heads=1, head_dim=2, causal=True).needs.decay]


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
    return inner.eval() if inner.needs is None else GatesFromKeys(inner).eval()


class GatesFromKeys(InnerAttention):
    """Hands an attention gates that are functions of its keys, so that the laws of q, k and v hold for it."""

    causal = True

    def __init__(self, inner: InnerAttention):
        super().__init__()
        self.inner, self.state_kind = inner, inner.state_kind

    def gates(self, k: Tensor) -> AnyGates:
        # what a mask hides may be no number, and its gates are functions of zeros then
        return gates_of(self.inner.needs, torch.where(k.isfinite(), k, 0).to(accumulator(k.dtype)))

    def _attend(self, q, k, v, key_mask):
        return self.inner(q, k, v, key_mask=key_mask, gates=self.gates(k))

    def _extend(self, q, k, v, state, key_mask):
        return self.inner.extend(q, k, v, state, key_mask=key_mask, gates=self.gates(k))

    def _checked_state(self, state):
        return self.inner._checked_state(state)


def gates_of(needs: AnyNeeds, k: Tensor) -> Any:
    if needs is None:
        return None
    if isinstance(needs, SplitNeeds):
        sizes = [count * k.shape[1] // sum(needs.heads) for count in needs.heads]
        return tuple(map(gates_of, needs.parts, k.split(sizes, 1)))
    mean, first = k.mean(-1), k[..., 0]
    log_decay = {None: None, "head": -F.softplus(mean - 1), "channel": -F.softplus(k - mean.unsqueeze(-1) - 1)}
    if needs.write == "rate":
        # stronger ones than e⁻¹⁰ are refused, however large the keys
        log_decay["channel"] = -6 * (k - mean.unsqueeze(-1) - 1).sigmoid()
    beta = {None: None, "strength": 2 * first.sigmoid(), "step": F.softplus(first), "rate": k.sigmoid()}
    return Gates(log_decay[needs.decay], beta[needs.write])


def heads(n: int, m: int | None = None, *, b: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    m = n if m is None else m
    k, v = torch.randn(2, b, KEY_HEADS, m, CHANNELS, dtype=torch.float64)
    return torch.randn(b, HEADS, n, CHANNELS, dtype=torch.float64), k, v
