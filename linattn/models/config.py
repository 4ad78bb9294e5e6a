"""The configuration of a language model: one frozen value, which converts to a dict for JSON and back."""

import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from linattn.attention.gates import needs_strength
from linattn.attention.named import named_attention
from linattn.checks import check_numbers, check_sizes, check_type, plain_number
from linattn.models.presets import PRESETS
from linattn.names import did_you_mean, synonyms, unknown_name
from linattn.nn import GatedConvolution, MultiheadAttention
from linattn.nn.attention import CONVOLUTIONS_ON, GATE_FUNCTIONS
from linattn.nn.checks import checked_head_dim

# names that other packages use, by ours, of fields and of their values
SYNONYMS = synonyms(
    attention="method methods",
    max_length="context_length block_size",
    dim="d_model n_embd hidden_size",
    depth="n_layer num_layers num_hidden_layers",
    num_heads="n_head nhead heads num_attention_heads",
    num_key_heads="num_key_value_heads",
    rms="rms_norm rmsnorm",
    layer="layer_norm layernorm",
    gated="swiglu glu",
    squared_relu="relu2 relu_squared",
)

_ARGUMENTS = inspect.signature(MultiheadAttention).parameters
# the docstring has a line per argument; without docstrings, as python -OO has it, there are no help texts
_ARGUMENT_LINES = dict(re.findall(r"^- `(\w+)`: (.+)$", inspect.getdoc(MultiheadAttention) or "", re.MULTILINE))


def _option(default: Any, description: str, *, least: int = 1, choices: Iterable[str | None] = ()) -> Any:
    """Return a field. `linattn train` makes an option of it, with the same name and description.

    `least` is the least value of an integer."""
    return field(default=default, metadata={"help": description, "least": least, "choices": tuple(choices)})


def _attention_option(name: str, default: Any = ..., *, least: int = 1, choices: Iterable[str | None] = ()) -> Any:
    """Return the field for an argument of `MultiheadAttention`, with its default and its line of the docstring."""
    default = _ARGUMENTS[name].default if default is ... else default
    return _option(default, _ARGUMENT_LINES.get(name, ""), least=least, choices=choices)


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """`attention` is a name or a mixture of `linattn.attention.named` ("softmax", "elu", "local+elu", "local:3+elu:1"),
    or "convolution:3", a gated convolution of that width instead of attention: one for all layers, or a tuple that
    repeats to the `depth`, a multiple of its length.

    Tokens are numbers below `vocab_size`. Only learned positions have a longest sequence, of `max_length` tokens. If
    `causal` is False, every token sees all others: an encoder, whose logits are for the token itself.
    `MultiheadAttention` describes the fields that are its arguments, and `linattn train --help` all other fields."""

    vocab_size: int
    dim: int = _option(256, "width of the model")
    depth: int = _option(4, "number of layers")
    num_heads: int = _attention_option("num_heads", 4)
    attention: str | tuple[str, ...] = _option(
        "local+elu", "such as elu or local:3+elu:1; or names of layers, which repeat"
    )
    num_key_heads: int | None = _attention_option("num_key_heads")
    head_dim: int | None = _attention_option("head_dim")
    key_dim: int | None = _attention_option("key_dim")
    window: int = _option(128, "tokens that a local head sees, its own among them")
    rotary: float | None = _attention_option("rotary", 10000.0)
    positions: str | None = _option(
        None, "learned: add a learned vector for each position to the embeddings", choices=(None, "learned")
    )
    max_length: int | None = None
    convolution: int = _attention_option("convolution", least=0)
    convolution_on: str = _attention_option("convolution_on", choices=CONVOLUTIONS_ON)
    induction: bool = _attention_option("induction")
    writes: int = _attention_option("writes")
    beta_limit: float = _attention_option("beta_limit")
    value_skip: bool = _attention_option("value_skip")
    gate: bool = _attention_option("gate")
    gate_function: str = _attention_option("gate_function", choices=GATE_FUNCTIONS)
    unit_keys: bool = _attention_option("unit_keys")
    head_norm: bool = _attention_option("head_norm")
    gated_norm: bool = _attention_option("gated_norm")
    head_norm_eps: float = _attention_option("head_norm_eps")
    feed_forward: str = _option(
        "gated",
        "gated is SwiGLU, gelu the one of GPT-2, squared_relu that of RWKV",
        choices=("gated", "gelu", "squared_relu", "none"),
    )
    mlp_ratio: float = _option(
        4.0, "hidden units of the feed-forward per channel of dim; gated has 2/3 of them and as many weights"
    )
    norm: str = _option("rms", "the norm before each half of a layer", choices=("rms", "layer"))
    tie_embeddings: bool = _option(True, "take the embeddings' matrix for the output")
    dropout: float = _option(0.0, "share of activations that is dropped")
    causal: bool = True

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = plain_number(getattr(self, each.name))
            _check_field(each, value)
            object.__setattr__(self, each.name, value)
        _check_combinations(self)
        _check_layers(self)

    @staticmethod
    def preset(name: str, **options: Any) -> "LanguageModelConfig":
        """Return the configuration of a published architecture, a `name` of `PRESETS`.

        The `options` are fields, `vocab_size` among them; they win over those of the preset."""
        return LanguageModelConfig.from_dict(preset_fields(name, options) | options)

    @property
    def hidden_dim(self) -> int:
        """The hidden units of the feed-forward, a multiple of 8 in the gated one, for matrix units."""
        if self.feed_forward == "gated":
            return 8 * math.ceil(self.mlp_ratio * self.dim / 12)
        return math.ceil(self.mlp_ratio * self.dim)

    @property
    def layers(self) -> tuple[str, ...]:
        """The attention of each layer."""
        names = (self.attention,) if isinstance(self.attention, str) else self.attention
        return names * (self.depth // len(names))

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

    def mixer(self, layer: int) -> MultiheadAttention | GatedConvolution:
        """Build the part of a layer that mixes tokens: attention, or a gated convolution."""
        width = self.convolution_width(layer)
        if width is not None:
            return GatedConvolution(self.dim, width, dropout=self.dropout)
        key_heads = self.num_heads if self.num_key_heads is None else self.num_key_heads
        head_dim = checked_head_dim(self.dim, self.num_heads, key_heads, self.head_dim)
        inner = named_attention(
            self.layers[layer],
            num_heads=self.num_heads,
            head_dim=head_dim if self.key_dim is None else self.key_dim,
            num_key_heads=key_heads,
            causal=self.causal,
            window=self.window,
        )
        options = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name in _ARGUMENTS}
        if not needs_strength(inner.needs):
            del options["beta_limit"], options["writes"]
        return MultiheadAttention(inner=inner, **options)

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


def preset_fields(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a preset sets; `options` may hold its dim, depth and num_heads (else the defaults)."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    sizes = {size: options.get(size, getattr(LanguageModelConfig, size)) for size in ("dim", "depth", "num_heads")}
    check_sizes(**sizes)
    return PRESETS[name].fields(**sizes)


def upgraded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration, which any version may have written. The first versions had no
    `head_norm_eps`: it becomes 0 where norms of heads are used without it."""
    has_norm = fields.get("head_norm") or fields.get("gated_norm")
    return {"head_norm_eps": 0.0, **fields} if has_norm else dict(fields)


def _check_field(each: dataclasses.Field, value: Any) -> None:
    least, choices = each.metadata.get("least", 1), each.metadata.get("choices")
    if each.type is bool:
        check_type(each.name, value, bool)
    if each.type is int or (each.type == int | None and value is not None):
        check_sizes(**{each.name: value}, least=least)
    if each.type is float or (each.type == float | None and value is not None):
        check_numbers(least=0.0, **{each.name: value})
    if choices and value not in choices:
        raise unknown_name(each.name, value, choices, SYNONYMS)


def _check_combinations(config: LanguageModelConfig) -> None:
    """Raise ValueError for numbers and combinations that no layer checks."""
    if config.dropout >= 1:
        raise ValueError(f"dropout must be in [0, 1), but is {config.dropout!r}")
    if config.mlp_ratio == 0:
        raise ValueError("mlp_ratio must be positive, but is 0")
    if config.feed_forward == "none" and config.mlp_ratio != LanguageModelConfig.mlp_ratio:
        raise ValueError(f'mlp_ratio is of the feed-forward, but is {config.mlp_ratio} with feed_forward "none"')
    if (config.positions == "learned") != (config.max_length is not None):
        raise ValueError(
            "max_length belongs to learned positions and they need it, "
            f"but positions is {config.positions!r} and max_length is {config.max_length!r}"
        )
    if not config.causal and config.convolution:
        raise ValueError(f"a short convolution is causal: an encoder has none, but convolution is {config.convolution}")


def _check_layers(config: LanguageModelConfig) -> None:
    names = config.attention
    if not (isinstance(names, (str, tuple)) and names and all(isinstance(name, str) for name in names)):
        raise ValueError(f"attention must be a name, or a tuple of names of layers, but is {names!r}")
    if isinstance(names, tuple) and config.depth % len(names):
        raise ValueError(
            f"attention names {len(names)} layers, which repeat, so depth must be a multiple of {len(names)}, "
            f"but is {config.depth}"
        )
    has_strength = _has_strength(config)
    for option, value in (("beta_limit", config.beta_limit), ("writes", config.writes)):
        if value != 1 and not has_strength:
            raise ValueError(f"{option} is of the delta rule, but is {value} and no layer has one")


# transformers reads each field of the same configuration many times
@lru_cache
def _has_strength(config: LanguageModelConfig) -> bool:
    """Return whether a layer has a write strength β. This builds each kind of layer once, which checks its options."""
    layers = {name: layer for layer, name in enumerate(config.layers)}.values()
    # random features must not show in the caller's randomness
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            mixers = [config.mixer(layer) for layer in layers]
        except RuntimeError as error:
            raise ValueError(f"no tensor holds a matrix of these sizes: {error}") from error
    return any(isinstance(mixer, MultiheadAttention) and needs_strength(mixer.inner.needs) for mixer in mixers)
