"""Modules for models of your own."""

from linattn.nn.attention import AttentionState, MultiheadAttention
from linattn.nn.branch import Branch, BranchState
from linattn.nn.convolution import GatedConvolution, ShortConvolution
from linattn.nn.feed_forward import Chunked, FeedForward, GatedFeedForward
from linattn.nn.gates import token_gates
from linattn.nn.image import ChannelLinearAttention, ImageLinearAttention, PositionLinearAttention
from linattn.nn.norms import HeadNorm, ScaleNorm
from linattn.nn.positions import AxialPositions, LearnedPositions, SinusoidalPositions
from linattn.nn.residual import Projected, ResidualSequence, ReversibleSequence
from linattn.nn.token_shift import TokenShift

__all__ = [
    "AttentionState",
    "AxialPositions",
    "Branch",
    "BranchState",
    "ChannelLinearAttention",
    "Chunked",
    "FeedForward",
    "GatedConvolution",
    "GatedFeedForward",
    "HeadNorm",
    "ImageLinearAttention",
    "LearnedPositions",
    "MultiheadAttention",
    "PositionLinearAttention",
    "Projected",
    "ResidualSequence",
    "ReversibleSequence",
    "ScaleNorm",
    "ShortConvolution",
    "SinusoidalPositions",
    "TokenShift",
    "token_gates",
]
