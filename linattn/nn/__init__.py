"""What people put into their own models."""

from linattn.nn.attention import AttentionState, MultiheadAttention
from linattn.nn.convolution import GatedConvolution, ShortConvolution
from linattn.nn.feed_forward import FeedForward, GatedFeedForward

__all__ = [
    "AttentionState",
    "FeedForward",
    "GatedConvolution",
    "GatedFeedForward",
    "MultiheadAttention",
    "ShortConvolution",
]
