"""Operators: functions of tensors without modules, randomness or configuration."""

from linattn.ops.delta import causal_delta_attention
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.explain import explain_backend
from linattn.ops.features import Features, FeatureState, causal_feature_attention, read_features, summarize_features
from linattn.ops.linear import causal_linear_attention, linear_attention, read, summarize
from linattn.ops.state import LinearState
from linattn.ops.tokens.packing import packed_log_decay

__all__ = [
    "ELEMENTWISE",
    "FeatureState",
    "Features",
    "LinearState",
    "causal_delta_attention",
    "causal_feature_attention",
    "causal_linear_attention",
    "explain_backend",
    "linear_attention",
    "packed_log_decay",
    "read",
    "read_features",
    "summarize",
    "summarize_features",
]
