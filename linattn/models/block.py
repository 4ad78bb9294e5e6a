"""One layer of a language model, built from its configuration."""

from typing import Any, NamedTuple, cast, final

from torch import nn

from linattn.models.config import LanguageModelConfig
from linattn.nn import FeedForward, GatedConvolution, GatedFeedForward, MultiheadAttention
from linattn.ops.state import checked_parts
from linattn.types import TokenMask, Tokens


@final
class Block(nn.Module):
    """x + mix(norm(x)), then x + feed_forward(norm(x)): no norm stands in the residual stream itself."""

    def __init__(self, config: LanguageModelConfig, layer: int):
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer = _mixer(config, layer)
        self.feed_forward_norm = None if config.feed_forward == "none" else make_norm(config)
        self.feed_forward = _feed_forward(config)

    def forward(self, x: Tokens, *, key_mask: TokenMask = None) -> Tokens:
        return self._feed(x + self.mixer(self.mixer_norm(x), key_mask=key_mask))

    def extend(self, x: Tokens, state: Any = None, *, key_mask: TokenMask = None) -> tuple[Tokens, Any]:
        y, state = self.mixer.extend(self.mixer_norm(x), state, key_mask=key_mask)
        return self._feed(x + y), state

    def _feed(self, x: Tokens) -> Tokens:
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x
        return x + self.feed_forward(self.feed_forward_norm(x))


class BlockSequence(NamedTuple):
    """Blocks, called as a `ResidualSequence` calls its branches. No block attends to a context."""

    blocks: nn.ModuleList

    def __call__(self, x: Tokens, *, key_mask: None, context: None, context_mask: None) -> Tokens:
        # causal layers need no mask: `run_stack` has moved the present tokens to the left
        for block in self.blocks:
            x = block(x)
        return x

    def extend(
        self, x: Tokens, state: tuple[Any, ...] | None, *, key_mask: TokenMask, context: None, context_mask: None
    ) -> tuple[Tokens, tuple[Any, ...]]:
        states = []
        for block, past in zip(self.blocks, checked_parts(state, len(self.blocks)), strict=True):
            x, after = cast(Block, block).extend(x, past, key_mask=key_mask)
            states.append(after)
        return x, tuple(states)


def make_norm(config: LanguageModelConfig) -> nn.Module:
    # 1e-6 and 1e-5 are relative to activations of about 1, which the norm itself makes: the customary values
    return nn.RMSNorm(config.dim, eps=1e-6) if config.norm == "rms" else nn.LayerNorm(config.dim)


def _mixer(config: LanguageModelConfig, layer: int) -> MultiheadAttention | GatedConvolution:
    width = config.convolution_width(layer)
    if width is not None:
        return GatedConvolution(config.dim, width, dropout=config.dropout)
    return MultiheadAttention(
        config.dim,
        config.num_heads,
        config.inner_attention(layer),
        num_key_heads=config.num_key_heads,
        head_dim=config.channels,
        key_dim=config.key_dim,
        rotary=config.rotary,
        convolution=config.convolution,
        head_norm=config.head_norm,
        gate=config.gate,
        dropout=config.dropout,
    )


def _feed_forward(config: LanguageModelConfig) -> FeedForward | GatedFeedForward | None:
    if config.feed_forward == "none":
        return None
    kind = GatedFeedForward if config.feed_forward == "gated" else FeedForward
    return kind(config.dim, config.hidden_dim, dropout=config.dropout)
