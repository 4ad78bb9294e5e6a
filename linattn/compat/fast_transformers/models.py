"""The encoder and decoder of fast-transformers, with the arguments of its builders, for machines where it cannot be
built. Katharopoulos et al., https://arxiv.org/abs/2006.16236"""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.attention.base import InnerAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.softmax import SoftmaxAttention
from linattn.compat.options import Rule, check_options
from linattn.feature_maps import ElementwiseFeatureMap, FeatureMap
from linattn.models.token_model import run_stack
from linattn.nn import Branch, FeedForward, MultiheadAttention
from linattn.nn.residual import PostNormSequence

MakeFeatureMap = Callable[[int], FeatureMap]

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


def elu(head_dim: int) -> FeatureMap:
    """elu(x) + 1, whatever the number of channels."""
    return ElementwiseFeatureMap("elu_plus_one")


def _linear(feature_map: FeatureMap, *, causal: bool) -> InnerAttention:
    return LinearAttention(feature_map, causal=causal)


def _full(feature_map: FeatureMap, *, causal: bool) -> InnerAttention:
    return SoftmaxAttention(causal=causal)


# "causal-full" is "full" that is always called with a TriangularCausalMask
ATTENTIONS: dict[str, Callable[[FeatureMap], InnerAttention]] = {
    "full": partial(_full, causal=False),
    "causal-full": partial(_full, causal=True),
    "linear": partial(_linear, causal=False),
    "causal-linear": partial(_linear, causal=True),
}


RULES = (
    Rule(
        ("feature_map",),
        lambda options: (
            not any(
                str(options.get(name, "")).endswith("linear")
                for name in ("attention_type", "self_attention_type", "cross_attention_type")
            )
        ),
        "where no attention is linear",
    ),
)


@final
class TransformerEncoder(nn.Module):
    """The model that `TransformerEncoderBuilder` and `RecurrentEncoderBuilder` build. Causal ones have
    `extend`. norm(x + attention(x)), then norm(x + feed_forward(x)), `n_layers` times, and a last norm.

    `feature_map` takes the channels of a query; of fast-transformers' own, `elu` and `Favor` are
    `HyperbolicFavorFeatureMap` here."""

    def __init__(
        self,
        n_layers: int = 4,
        n_heads: int = 4,
        query_dimensions: int = 64,
        value_dimensions: int = 64,
        feed_forward_dimensions: int = 1024,
        model_dimensions: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        final_normalization: bool = True,
        attention_type: str = "full",
        feature_map: MakeFeatureMap = elu,
    ):
        check_options(TransformerEncoder, RULES, locals())
        super().__init__()
        dim = n_heads * value_dimensions if model_dimensions is None else model_dimensions
        attention = partial(_attention, dim, n_heads, query_dimensions, value_dimensions, dropout=dropout)
        feed_forward = partial(_feed_forward, dim, feed_forward_dimensions, dropout, activation)
        branches = [
            Branch(part)
            for _ in range(n_layers)
            for part in (attention(_inner(attention_type, query_dimensions, feature_map)), feed_forward())
        ]
        self.layers = PostNormSequence(branches, [nn.LayerNorm(dim) for _ in branches])
        self.norm = nn.LayerNorm(dim) if final_normalization else None
        self.causal = attention_type.startswith("causal")

    def forward(
        self, x: Float[Tensor, "b n d"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Apply the layers. `key_mask` is True where a token is present; it replaces `LengthMask`."""
        return _normed(self.norm, run_stack(self.layers, self.causal, x, key_mask, None, None))

    def extend(
        self, x: Float[Tensor, "b n d"], state: Any = None, *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Any]:
        """Return what `forward` does, for the next tokens of sequences whose past is in `state`, and the new state."""
        y, state = self.layers.extend(x, state, key_mask=key_mask)
        return _normed(self.norm, y), state


@final
class TransformerDecoder(nn.Module):
    """The model that `TransformerDecoderBuilder` and `RecurrentDecoderBuilder` build: self attention,
    attention to a memory of `cross_model_dimensions` channels, feed-forward, each followed by a norm."""

    def __init__(
        self,
        n_layers: int = 4,
        n_heads: int = 4,
        query_dimensions: int = 64,
        value_dimensions: int = 64,
        feed_forward_dimensions: int = 1024,
        model_dimensions: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        final_normalization: bool = True,
        self_attention_type: str = "full",
        cross_attention_type: str = "full",
        cross_n_heads: int | None = None,
        cross_query_dimensions: int | None = None,
        cross_value_dimensions: int | None = None,
        cross_model_dimensions: int | None = None,
        feature_map: MakeFeatureMap = elu,
    ):
        check_options(TransformerDecoder, RULES, locals())
        super().__init__()
        dim = n_heads * value_dimensions if model_dimensions is None else model_dimensions
        of_query = query_dimensions if cross_query_dimensions is None else cross_query_dimensions
        attention = partial(_attention, dim, n_heads, query_dimensions, value_dimensions, dropout=dropout)
        crossing = partial(
            _attention,
            dim,
            n_heads if cross_n_heads is None else cross_n_heads,
            of_query,
            value_dimensions if cross_value_dimensions is None else cross_value_dimensions,
            dropout=dropout,
            context_dim=dim if cross_model_dimensions is None else cross_model_dimensions,
        )
        feed_forward = partial(_feed_forward, dim, feed_forward_dimensions, dropout, activation)
        branches = []
        for _ in range(n_layers):
            branches.append(Branch(attention(_inner(self_attention_type, query_dimensions, feature_map))))
            branches.append(Branch(crossing(_inner(cross_attention_type, of_query, feature_map))))
            branches.append(Branch(feed_forward()))
        self.layers = PostNormSequence(branches, [nn.LayerNorm(dim) for _ in branches])
        self.norm = nn.LayerNorm(dim) if final_normalization else None
        self.causal = self_attention_type.startswith("causal")

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m c"],
        *,
        key_mask: Bool[Tensor, "b n"] | None = None,
        memory_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Apply the layers. The masks are True where a token of x or of the memory is present."""
        return _normed(self.norm, run_stack(self.layers, self.causal, x, key_mask, memory, memory_mask))

    def extend(
        self,
        x: Float[Tensor, "b n d"],
        state: Any = None,
        *,
        memory: Float[Tensor, "b m c"] | None = None,
        key_mask: Bool[Tensor, "b n"] | None = None,
        memory_mask: Bool[Tensor, "b m"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], Any]:
        """Return what `forward` does, for the next tokens, and the new state. Only the first call needs the memory."""
        y, state = self.layers.extend(x, state, key_mask=key_mask, context=memory, context_mask=memory_mask)
        return _normed(self.norm, y), state


def _inner(kind: str, channels: int, feature_map: MakeFeatureMap) -> InnerAttention:
    if kind not in ATTENTIONS:
        raise ValueError(f"an attention type must be one of {', '.join(ATTENTIONS)}, but is {kind!r}")
    return ATTENTIONS[kind](feature_map(channels))


def _attention(
    dim: int,
    heads: int,
    of_query: int,
    of_value: int,
    inner: InnerAttention,
    *,
    dropout: float,
    context_dim: int | None = None,
) -> MultiheadAttention:
    return MultiheadAttention(
        dim, heads, inner, head_dim=of_value, key_dim=of_query, context_dim=context_dim, bias=True, dropout=dropout
    )


def _feed_forward(dim: int, hidden: int, dropout: float, activation: str) -> FeedForward:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, but is {activation!r}")
    return FeedForward(dim, hidden, activation=ACTIVATIONS[activation], dropout=dropout, hidden_dropout=dropout)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
