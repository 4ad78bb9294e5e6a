"""The encoder and decoder of fast-transformers, with the arguments of its builders, for machines where it cannot be
built. Katharopoulos et al., https://arxiv.org/abs/2006.16236"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from linattn.attention import InnerAttention, LinearAttention, SoftmaxAttention
from linattn.checks import check_types
from linattn.compat.fast_transformers.post_norm import PostNormSequence
from linattn.compat.options import Idle, Options, takes
from linattn.feature_maps import ElementwiseFeatureMap, FeatureMap
from linattn.models.token_model import run_stack
from linattn.names import unknown_name
from linattn.nn import Branch, FeedForward, MultiheadAttention
from linattn.nn.branch import Call
from linattn.types import Context, ContextMask, TokenMask, Tokens

MakeFeatureMap = Callable[[int], FeatureMap]

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}

# "causal-full" is "full" that is always called with a TriangularCausalMask
ATTENTIONS: dict[str, Callable[[FeatureMap], InnerAttention]] = {
    "full": lambda feature_map: SoftmaxAttention(causal=False),
    "causal-full": lambda feature_map: SoftmaxAttention(causal=True),
    "linear": lambda feature_map: LinearAttention(feature_map, causal=False),
    "causal-linear": lambda feature_map: LinearAttention(feature_map, causal=True),
}


@check_types
def elu(head_dim: int) -> FeatureMap:
    """Return the feature map elu(x) + 1, which serves any number of channels."""
    return ElementwiseFeatureMap("elu_plus_one")


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(Options):
    """The builders' options. An encoder has an `attention_type`, a decoder one for each of its attentions."""

    n_layers: int = 4
    n_heads: int = 4
    query_dimensions: int = 64
    value_dimensions: int = 64
    feed_forward_dimensions: int = 1024
    model_dimensions: int | None = None
    dropout: float = 0.1
    activation: str = "relu"
    final_normalization: bool = True
    feature_map: MakeFeatureMap = elu
    attention_type: str = "full"
    self_attention_type: str = "full"
    cross_attention_type: str = "full"
    cross_n_heads: int | None = None
    cross_query_dimensions: int | None = None
    cross_value_dimensions: int | None = None
    cross_model_dimensions: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.feature_map, FeatureMap) or not callable(self.feature_map):
            raise ValueError(
                "feature_map must be a function from the number of channels of a query to a feature map, such as "
                f"`elu`, but is {self.feature_map!r}"
            )
        super().__post_init__()

    @property
    def dim(self) -> int:
        return self.n_heads * self.value_dimensions if self.model_dimensions is None else self.model_dimensions

    def without_effect(self) -> Idle:
        kinds = self.attention_type, self.self_attention_type, self.cross_attention_type
        if not any(kind.endswith("linear") for kind in kinds):
            yield ("feature_map",), "where no attention is linear"


_SIZES = (
    "n_layers n_heads query_dimensions value_dimensions feed_forward_dimensions model_dimensions dropout activation "
    "final_normalization"
)


class _Transformer(nn.Module):
    """norm(x + part(x)) for each part of each layer, and a last norm. If it `crosses`, layers also read a memory."""

    def __init__(self, options: TransformerOptions, attention_type: str, *, crosses: bool = False):
        super().__init__()
        layers = (_layer(options, attention_type, crosses) for _ in range(options.n_layers))
        branches = [Branch(part) for layer in layers for part in layer]
        self.layers = PostNormSequence(branches, [nn.LayerNorm(options.dim) for _ in branches])
        self.norm = nn.LayerNorm(options.dim) if options.final_normalization else nn.Identity()
        self.causal = attention_type.startswith("causal")


@final
class TransformerEncoder(_Transformer):
    """The model that `TransformerEncoderBuilder` and `RecurrentEncoderBuilder` build. Causal models have the method
    `extend`. norm(x + attention(x)), then norm(x + feed_forward(x)), `n_layers` times, and a last norm.

    `feature_map` is a function from the number of channels of a query to a feature map, such as `elu` here. For the
    `Favor` of fast-transformers, take `HyperbolicFavorFeatureMap`."""

    @takes(TransformerOptions, f"{_SIZES} attention_type feature_map")
    def __init__(self, options: TransformerOptions):
        super().__init__(options, options.attention_type)

    def forward(self, x: Tokens, *, key_mask: TokenMask = None) -> Tokens:
        """Apply the layers. `key_mask` is True where a token is present; it replaces `LengthMask`."""
        return self.norm(run_stack(self.layers, self.causal, x, Call(key_mask, None, None)))

    def extend(self, x: Tokens, state: Any = None, *, key_mask: TokenMask = None) -> tuple[Tokens, Any]:
        """Return the outputs for the next tokens of sequences whose past is in `state`, and the new state."""
        y, state = self.layers.extend(x, state, key_mask=key_mask)
        return self.norm(y), state


@final
class TransformerDecoder(_Transformer):
    """The model that `TransformerDecoderBuilder` and `RecurrentDecoderBuilder` build: self attention,
    attention to a memory of `cross_model_dimensions` channels (by default `cross_n_heads` ·
    `cross_value_dimensions`), feed-forward, each followed by a norm."""

    @takes(
        TransformerOptions,
        f"{_SIZES} self_attention_type cross_attention_type cross_n_heads cross_query_dimensions "
        "cross_value_dimensions cross_model_dimensions feature_map",
    )
    def __init__(self, options: TransformerOptions):
        super().__init__(options, options.self_attention_type, crosses=True)

    def forward(
        self, x: Tokens, memory: Float[Tensor, "b m c"], *, key_mask: TokenMask = None, memory_mask: ContextMask = None
    ) -> Tokens:
        """Apply the layers. The masks are True where a token of x or of the memory is present."""
        return self.norm(run_stack(self.layers, self.causal, x, Call(key_mask, memory, memory_mask)))

    def extend(
        self,
        x: Tokens,
        state: Any = None,
        *,
        memory: Context = None,
        key_mask: TokenMask = None,
        memory_mask: ContextMask = None,
    ) -> tuple[Tokens, Any]:
        """Return the outputs for the next tokens, and the new state. Only the first call needs the memory."""
        y, state = self.layers.extend(x, state, key_mask=key_mask, context=memory, context_mask=memory_mask)
        return self.norm(y), state


def _layer(options: TransformerOptions, attention_type: str, crosses: bool) -> list[nn.Module]:
    """Return the parts of a layer: self attention, attention to the memory if it `crosses`, and feed-forward."""
    if options.activation not in ACTIVATIONS:
        raise unknown_name("activation", options.activation, ACTIVATIONS)
    sizes = options.n_heads, options.query_dimensions, options.value_dimensions
    parts: list[nn.Module] = [_attention(options, attention_type, *sizes)]
    if crosses:
        own = options.cross_n_heads, options.cross_query_dimensions, options.cross_value_dimensions
        heads, keys, values = (
            size if of_cross is None else of_cross for size, of_cross in zip(sizes, own, strict=True)
        )
        memory = heads * values if options.cross_model_dimensions is None else options.cross_model_dimensions
        parts.append(_attention(options, options.cross_attention_type, heads, keys, values, context_dim=memory))
    widths, activation = (options.dim, options.feed_forward_dimensions), ACTIVATIONS[options.activation]
    dropout = options.dropout
    return [*parts, FeedForward(*widths, activation=activation, dropout=dropout, hidden_dropout=dropout)]


def _attention(
    options: TransformerOptions, kind: str, heads: int, of_query: int, of_value: int, *, context_dim: int | None = None
) -> MultiheadAttention:
    if kind not in ATTENTIONS:
        raise unknown_name("an attention type", kind, ATTENTIONS)
    inner = ATTENTIONS[kind](options.feature_map(of_query))
    sizes = {"head_dim": of_value, "key_dim": of_query, "context_dim": context_dim}
    return MultiheadAttention(options.dim, heads, inner, **sizes, bias=True, dropout=options.dropout)
