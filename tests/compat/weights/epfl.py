"""fast-transformers' encoder and decoder by their definition, with its names: the package needs a compiler and an old
torch. https://arxiv.org/abs/2006.16236, section 3, with the residual stream of https://arxiv.org/abs/1706.03762"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# of its denominators
EPSILON = 1e-6

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, feature_map: Callable[[Tensor], Tensor]) -> Tensor:
    weights = feature_map(q) @ feature_map(k).mT
    weights = weights.tril() if causal else weights
    return weights @ v / (weights.sum(-1, keepdim=True) + EPSILON)


def full(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, feature_map: Any) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) if causal else torch.zeros_like(scores, dtype=torch.bool)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


INNER = {
    "linear": (linear, False),
    "causal-linear": (linear, True),
    "full": (full, False),
    "causal-full": (full, True),
}


def elu(x: Tensor) -> Tensor:
    return F.elu(x) + 1


class Favor(nn.Module):
    """exp([xω, −xω] − ‖x‖²/2) / √f, with x scaled by the softmax temperature's root."""

    def __init__(self, channels: int, num_features: int):
        super().__init__()
        self.register_buffer("omega", torch.randn(channels, num_features // 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        u = x @ self.omega
        return torch.exp(torch.cat([u, -u], -1) - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(2 * u.shape[-1])


class InnerAttention(nn.Module):
    def __init__(self, kind: str, feature_map: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function, self.causal = INNER[kind]
        self.feature_map = feature_map

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v, causal=self.causal, feature_map=self.feature_map)


class AttentionLayer(nn.Module):
    def __init__(self, inner: InnerAttention, dim: int, heads: int, keys: int, values: int, memory: int):
        super().__init__()
        self.inner_attention, self.heads = inner, heads
        self.query_projection, self.key_projection = nn.Linear(dim, heads * keys), nn.Linear(memory, heads * keys)
        self.value_projection, self.out_projection = nn.Linear(memory, heads * values), nn.Linear(heads * values, dim)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.query_projection(x), self.key_projection(memory), self.value_projection(memory)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        return self.out_projection(self.inner_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Each step is added and normalised; the attentions have the names they are given."""

    def __init__(self, dim: int, hidden: int, activation: str, attentions: dict[str, AttentionLayer]):
        super().__init__()
        for name, attention in attentions.items():
            self.add_module(name, attention)
        self.names = list(attentions)
        self.linear1, self.linear2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        for index in range(len(attentions) + 1):
            self.add_module(f"norm{index + 1}", nn.LayerNorm(dim))
        self.activation = getattr(F, activation)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        for index, name in enumerate(self.names):
            seen = memory if name == "cross_attention" else x
            x = self.get_submodule(f"norm{index + 1}")(x + self.get_submodule(name)(x, seen))
        y = self.linear2(self.activation(self.linear1(x)))
        return self.get_submodule(f"norm{len(self.names) + 1}")(x + y)


class Transformer(nn.Module):
    def __init__(self, layers: list[Layer], dim: int, final_normalization: bool):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(dim) if final_normalization else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return x if self.norm is None else self.norm(x)


def encoder(config: dict[str, Any], feature_map: Callable[[int], Callable[[Tensor], Tensor]]) -> Transformer:
    return _transformer(config, {"attention": config["attention_type"]}, feature_map)


def decoder(config: dict[str, Any], feature_map: Callable[[int], Callable[[Tensor], Tensor]]) -> Transformer:
    kinds = {name: config[f"{name}_type"] for name in ("self_attention", "cross_attention")}
    return _transformer(config, kinds, feature_map)


def _transformer(config: dict[str, Any], kinds: dict[str, str], feature_map: Callable[[int], Any]) -> Transformer:
    dim = config.get("model_dimensions") or config["n_heads"] * config["value_dimensions"]
    layers = []
    for _ in range(config["n_layers"]):
        attentions = {name: _attention(config, name, kind, dim, feature_map) for name, kind in kinds.items()}
        layers.append(Layer(dim, config["feed_forward_dimensions"], config.get("activation", "relu"), attentions))
    return Transformer(layers, dim, config.get("final_normalization", True))


def _attention(config: dict[str, Any], name: str, kind: str, dim: int, feature_map: Any) -> AttentionLayer:
    def size(option: str) -> int:
        return config.get(f"cross_{option}", config[option]) if name == "cross_attention" else config[option]

    memory = dim
    if name == "cross_attention":
        # what the memory's own encoder puts out, if the decoder has another width
        memory = config.get("cross_model_dimensions") or size("n_heads") * size("value_dimensions")
    inner = InnerAttention(kind, feature_map(size("query_dimensions")))
    return AttentionLayer(inner, dim, size("n_heads"), size("query_dimensions"), size("value_dimensions"), memory)
