"""The configuration of a language model: one frozen value that goes to JSON and back."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from linattn.attention.base import InnerAttention
from linattn.attention.gates import needs_strength
from linattn.attention.named import named_attention
from linattn.names import did_you_mean, unknown_name

# names that other packages use, of fields and of their values
SYNONYMS = {
    "context_length": "max_length",
    "block_size": "max_length",
    "d_model": "dim",
    "n_embd": "dim",
    "hidden_size": "dim",
    "n_layer": "depth",
    "num_layers": "depth",
    "num_hidden_layers": "depth",
    "n_head": "num_heads",
    "nhead": "num_heads",
    "heads": "num_heads",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_key_heads",
    "rms_norm": "rms",
    "rmsnorm": "rms",
    "layer_norm": "layer",
    "layernorm": "layer",
    "swiglu": "gated",
    "glu": "gated",
}


def _option(default: Any, description: str, *, least: int = 1, choices: tuple[str | None, ...] = ()) -> Any:
    """Return a field. `linattn train` makes an option of it, with the same name and description.

    `least` is the least value of an integer."""
    return field(default=default, metadata={"help": description, "least": least, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """`attention` is a name or a mixture of `linattn.attention.named` ("softmax", "elu", "local+elu", "local:3+elu:1"),
    or "convolution:3", a gated convolution of that width instead of attention: one for all layers, or one per layer.

    Tokens are numbers below `vocab_size`. Only learned positions have a longest sequence, of `max_length` tokens. If
    `causal` is False, every token sees all others: an encoder, whose logits are those of the token itself."""

    vocab_size: int = field(metadata={"least": 1, "choices": ()})
    dim: int = _option(256, "width of the model")
    depth: int = _option(4, "number of layers")
    num_heads: int = _option(4, "attention heads per layer")
    attention: str | tuple[str, ...] = _option("local+elu", "such as elu or local:3+elu:1; or one for each layer")
    num_key_heads: int | None = _option(
        None, "fewer heads for keys and values, shared by consecutive query heads (default: as many)"
    )
    head_dim: int | None = _option(None, "width of a head (default: dim / num_heads)")
    key_dim: int | None = _option(
        None, 'width of a head\'s queries and keys, small for maps such as "taylor2" (default: that of its values)'
    )
    window: int = _option(128, "tokens that a local head sees, its own among them")
    rotary: float | None = _option(10000.0, "base of the rotary positions in queries and keys, or none")
    positions: str | None = _option(
        None, "learned: add a learned vector for each position to the embeddings", choices=(None, "learned")
    )
    max_length: int | None = field(default=None, metadata={"least": 1, "choices": ()})
    convolution: int = _option(0, "width of the short causal convolution before q, k and v (0: none)", least=0)
    convolution_on: str = _option(
        "inputs",
        "the convolution is on the inputs of q, k and v, or on their projections with a SiLU",
        choices=("inputs", "projections"),
    )
    beta_limit: float = _option(1.0, "largest write strength of delta, gated_delta and kda; 2 lets them track states")
    unit_keys: bool = _option(False, "divide q and k of each head by their lengths, as the delta rule always does")
    value_skip: bool = _option(False, "add D v to each head's output, with a learned D, as in Mamba-2")
    head_norm: bool = _option(False, "RMSNorm of each head's output, which un-normalised attention needs")
    gate: bool = _option(False, "multiply the attention's output by silu(W x)")
    gate_function: str = _option("silu", "of W x in the gate", choices=("silu", "sigmoid"))
    gated_norm: bool = _option(False, "RMSNorm of the attention's output after the gate, as in Mamba-2")
    feed_forward: str = _option("gated", "gated is SwiGLU, gelu the one of GPT-2", choices=("gated", "gelu", "none"))
    mlp_ratio: float = _option(
        4.0, "hidden units of the gelu feed-forward per channel of dim; gated has 2/3 of them and as many weights"
    )
    norm: str = _option("rms", "the norm before each half of a layer", choices=("rms", "layer"))
    tie_embeddings: bool = _option(True, "take the embeddings' matrix for the output")
    dropout: float = _option(0.0, "share of activations that is dropped")
    causal: bool = field(default=True, metadata={"least": 1, "choices": ()})

    def __post_init__(self) -> None:
        _check_fields(self)
        for misfit in _misfits(self):
            raise ValueError(misfit)
        _check_attention(self)

    @property
    def hidden_dim(self) -> int:
        """The hidden units of the feed-forward, a multiple of 8 in the gated one, for matrix units."""
        if self.feed_forward == "gated":
            return 8 * math.ceil(self.mlp_ratio * self.dim / 12)
        return math.ceil(self.mlp_ratio * self.dim)

    @property
    def layers(self) -> tuple[str, ...]:
        """The attention of each layer."""
        return (self.attention,) * self.depth if isinstance(self.attention, str) else self.attention

    def convolution_width(self, layer: int) -> int | None:
        """Return the width of a layer that is a gated convolution, None for attention."""
        kind, _, width = self.layers[layer].partition(":")
        if kind != "convolution":
            return None
        if not width.isdecimal() or int(width) < 1:
            raise ValueError(
                f"a convolution is named with its width, as in 'convolution:3', not {self.layers[layer]!r}"
            )
        if not self.causal:
            raise ValueError(f"a convolution is causal: an encoder has none, but its layer is {self.layers[layer]!r}")
        return int(width)

    def inner_attention(self, layer: int) -> InnerAttention:
        head_dim = self.dim // self.num_heads if self.head_dim is None else self.head_dim
        return named_attention(
            self.layers[layer],
            num_heads=self.num_heads,
            head_dim=head_dim if self.key_dim is None else self.key_dim,
            num_key_heads=self.num_key_heads,
            causal=self.causal,
            window=self.window,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        attention = self.attention if isinstance(self.attention, str) else list(self.attention)
        return dataclasses.asdict(self) | {"attention": attention}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> "LanguageModelConfig":
        known = [field.name for field in dataclasses.fields(LanguageModelConfig)]
        if unknown := [name for name in fields if name not in known]:
            asked = ", ".join(f"{name!r}{did_you_mean(name, known, SYNONYMS)}" for name in unknown)
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


def _check_fields(config: LanguageModelConfig) -> None:
    for each in dataclasses.fields(config):
        value, least, choices = getattr(config, each.name), each.metadata["least"], each.metadata["choices"]
        if each.type is bool and not isinstance(value, bool):
            raise ValueError(f"{each.name} must be true or false, but is {value!r}")
        if (each.type is int or (each.type == int | None and value is not None)) and not (
            isinstance(value, int) and not isinstance(value, bool) and value >= least
        ):
            raise ValueError(f"{each.name} must be an integer of at least {least}, but is {value!r}")
        if choices and value not in choices:
            raise unknown_name(each.name, value, choices, SYNONYMS)


def _misfits(config: LanguageModelConfig) -> Iterator[str]:
    """Say what is wrong with values and with combinations of values."""
    if not (_is_number(config.dropout) and 0 <= config.dropout < 1):
        yield f"dropout must be in [0, 1), but is {config.dropout!r}"
    if not (_is_number(config.mlp_ratio) and 0 < config.mlp_ratio < math.inf):
        yield f"mlp_ratio must be positive and finite, but is {config.mlp_ratio!r}"
    if config.feed_forward == "none" and config.mlp_ratio != LanguageModelConfig.mlp_ratio:
        yield f'mlp_ratio is of the feed-forward, but is {config.mlp_ratio} with feed_forward "none"'
    if config.rotary is not None and not (_is_number(config.rotary) and 1 < config.rotary < math.inf):
        yield f"rotary must be None or a base above 1, but is {config.rotary!r}"
    if config.head_dim is None and config.dim % config.num_heads:
        yield f"num_heads must divide dim, but they are {config.num_heads} and {config.dim}"
    if config.num_key_heads is not None and config.num_heads % config.num_key_heads:
        yield f"num_key_heads must divide num_heads, but they are {config.num_key_heads} and {config.num_heads}"
    if (config.positions == "learned") != (config.max_length is not None):
        yield (
            "max_length belongs to learned positions and they need it, "
            f"but positions is {config.positions!r} and max_length is {config.max_length!r}"
        )
    if not (_is_number(config.beta_limit) and 0 < config.beta_limit <= 2):
        yield f"beta_limit must be above 0 and at most 2, but is {config.beta_limit!r}"
    if config.convolution_on != "inputs" and not config.convolution:
        yield f"convolution_on is {config.convolution_on!r}, but convolution is 0: there is none"
    if config.gate_function != "silu" and not config.gate:
        yield f"gate_function is {config.gate_function!r}, but gate is false: there is none"
    if not config.causal and config.convolution:
        yield f"a short convolution is causal: an encoder has none, but convolution is {config.convolution}"


def _check_attention(config: LanguageModelConfig) -> None:
    names = config.layers
    if not (isinstance(config.attention, (str, tuple)) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"attention must be a name or a name for each layer, but is {config.attention!r}")
    if len(names) != config.depth:
        raise ValueError(f"attention names {len(names)} layers, but depth is {config.depth}")
    # only building an attention tells whether it can be built; random features must not show in the caller's randomness
    with torch.random.fork_rng(devices=[]):
        layers = {name: layer for layer, name in enumerate(names)}.values()
        built = [config.inner_attention(layer) for layer in layers if config.convolution_width(layer) is None]
    if config.beta_limit != 1 and not any(needs_strength(inner.needs) for inner in built):
        raise ValueError(f"beta_limit is of the delta rule, but is {config.beta_limit} and no layer has one")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
