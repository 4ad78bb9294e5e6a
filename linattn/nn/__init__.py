"""What people put into their own models."""

from linattn.nn.attention import AttentionState, MultiheadAttention
from linattn.nn.convolution import GatedConvolution, ShortConvolution
from linattn.nn.feed_forward import FeedForward, GatedFeedForward
from linattn.nn.head_norm import HeadNorm

__all__ = [
    "AttentionState",
    "FeedForward",
    "GatedConvolution",
    "GatedFeedForward",
    "HeadNorm",
    "MultiheadAttention",
    "ShortConvolution",
]
