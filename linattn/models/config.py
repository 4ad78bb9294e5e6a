"""What a language model is, as one frozen value that goes to JSON and back."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from linattn.attention.base import InnerAttention
from linattn.attention.named import named_attention
from linattn.ops.names import did_you_mean, unknown_name

FEED_FORWARDS = ("gated", "gelu", "none")
NORMS = ("rms", "layer")
POSITIONS = (None, "learned")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """`attention` is a name or a mixture of `linattn.attention.named` ("softmax", "elu", "local+elu", "local:3+elu:1"),
    or "convolution:3", a gated convolution of that width instead of attention: one for all layers, or one a layer."""

    vocab_size: int
    dim: int = 256
    depth: int = 4
    num_heads: int = 4
    attention: str | tuple[str, ...] = "local+elu"
    num_key_heads: int | None = None
    """Fewer than num_heads: consecutive query heads share a key head. None: as many."""
    head_dim: int | None = None
    """None: dim / num_heads."""
    key_dim: int | None = None
    """Channels of a head's q and k: few for a map with many features, such as "taylor2". None: head_dim, as v has."""
    window: int = 128
    """Tokens that a local head sees, its own among them."""
    rotary: float | None = 10000.0
    """Base of the rotary positions in q and k. None: none."""
    positions: str | None = None
    """"learned": a learned vector for each of max_length positions is added to the embeddings."""
    max_length: int | None = None
    """Longest sequence; only learned positions have one."""
    convolution: int = 0
    """Width of a short causal convolution on the inputs of q, k and v. 0: none."""
    head_norm: bool = False
    """RMSNorm of each head's output, which un-normalised attention needs."""
    gate: bool = False
    """The attention's output is multiplied by silu(W x)."""
    feed_forward: str = "gated"
    """"gated" (SwiGLU), "gelu" (as in GPT-2) or "none"."""
    mlp_ratio: float = 4.0
    """Hidden units of the gelu feed-forward for each of dim; the gated one has 2/3 of them, so as many weights."""
    norm: str = "rms"
    """"rms" or "layer"."""
    tie_embeddings: bool = True
    """The output's matrix is the embeddings'."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def hidden_dim(self) -> int:
        """Hidden units of the feed-forward; the gated one's are a multiple of 8, which matrix units like."""
        if self.feed_forward == "gated":
            return 8 * math.ceil(self.mlp_ratio * self.dim / 12)
        return math.ceil(self.mlp_ratio * self.dim)

    @property
    def channels(self) -> int:
        """Channels of a head's values and output."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def key_channels(self) -> int:
        """Channels of a head's queries and keys."""
        return self.channels if self.key_dim is None else self.key_dim

    @property
    def layers(self) -> tuple[str, ...]:
        """The attention of each layer."""
        return (self.attention,) * self.depth if isinstance(self.attention, str) else self.attention

    def convolution_width(self, layer: int) -> int | None:
        """Of a layer that is a gated convolution; None if it is attention."""
        kind, _, width = self.layers[layer].partition(":")
        if kind != "convolution":
            return None
        if not width.isdecimal() or int(width) < 1:
            raise ValueError(
                f"a convolution is named with its width, as in 'convolution:3', not {self.layers[layer]!r}"
            )
        return int(width)

    def inner_attention(self, layer: int) -> InnerAttention:
        return named_attention(
            self.layers[layer],
            num_heads=self.num_heads,
            head_dim=self.key_channels,
            num_key_heads=self.num_key_heads,
            causal=True,
            window=self.window,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        attention = self.attention if isinstance(self.attention, str) else list(self.attention)
        return dataclasses.asdict(self) | {"attention": attention}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> "LanguageModelConfig":
        known = [field.name for field in dataclasses.fields(LanguageModelConfig)]
        if unknown := [name for name in fields if name not in known]:
            asked = ", ".join(f"{name!r}{did_you_mean(name, known)}" for name in unknown)
            raise ValueError(f"unknown configuration {asked}; known are {', '.join(known)}")
        if "vocab_size" not in fields:
            raise ValueError("the configuration has no vocab_size")
        # JSON has lists only
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return LanguageModelConfig(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_json(text: str) -> "LanguageModelConfig":
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the configuration is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"the configuration must be a JSON object, but is a {type(fields).__name__}")
        return LanguageModelConfig.from_dict(fields)


def _check_types(config: LanguageModelConfig) -> None:
    for name in ("vocab_size", "dim", "depth", "num_heads", "window"):
        _require_integer(name, getattr(config, name), 1)
    for name in ("num_key_heads", "head_dim", "key_dim", "max_length"):
        if getattr(config, name) is not None:
            _require_integer(name, getattr(config, name), 1)
    _require_integer("convolution", config.convolution, 0)
    for name in ("head_norm", "gate", "tie_embeddings"):
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} must be true or false, but is {getattr(config, name)!r}")


def _check_choices(config: LanguageModelConfig) -> None:
    for name, choices in (("feed_forward", FEED_FORWARDS), ("norm", NORMS), ("positions", POSITIONS)):
        value = getattr(config, name)
        if value not in choices:
            raise unknown_name(name, value, choices)


def _check_numbers(config: LanguageModelConfig) -> None:
    if not (_is_number(config.dropout) and 0 <= config.dropout < 1):
        raise ValueError(f"dropout must be in [0, 1), but is {config.dropout!r}")
    if not (_is_number(config.mlp_ratio) and 0 < config.mlp_ratio < math.inf):
        raise ValueError(f"mlp_ratio must be positive and finite, but is {config.mlp_ratio!r}")
    if config.feed_forward == "none" and config.mlp_ratio != LanguageModelConfig.mlp_ratio:
        raise ValueError(f'mlp_ratio is of the feed-forward, but is {config.mlp_ratio} with feed_forward "none"')
    if config.rotary is not None and not (_is_number(config.rotary) and 1 < config.rotary < math.inf):
        raise ValueError(f"rotary must be None or a base above 1, but is {config.rotary!r}")


def _check_heads(config: LanguageModelConfig) -> None:
    if config.head_dim is None and config.dim % config.num_heads:
        raise ValueError(f"num_heads must divide dim, but they are {config.num_heads} and {config.dim}")
    if config.num_key_heads is not None and config.num_heads % config.num_key_heads:
        raise ValueError(
            f"num_key_heads must divide num_heads, but they are {config.num_key_heads} and {config.num_heads}"
        )


def _check_attention(config: LanguageModelConfig) -> None:
    names = config.layers
    if not (isinstance(config.attention, (str, tuple)) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"attention must be a name or a name for each layer, but is {config.attention!r}")
    if len(names) != config.depth:
        raise ValueError(f"attention names {len(names)} layers, but depth is {config.depth}")
    # only building an attention tells whether it can be built; random features must not show in the caller's randomness
    with torch.random.fork_rng(devices=[]):
        for layer in {name: layer for layer, name in enumerate(names)}.values():
            if config.convolution_width(layer) is None:
                config.inner_attention(layer)


def _check_positions(config: LanguageModelConfig) -> None:
    if (config.positions == "learned") != (config.max_length is not None):
        raise ValueError(
            "max_length belongs to learned positions and they need it, "
            f"but positions is {config.positions!r} and max_length is {config.max_length!r}"
        )


_CHECKS = (_check_types, _check_choices, _check_numbers, _check_heads, _check_attention, _check_positions)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, but is {value!r}")
