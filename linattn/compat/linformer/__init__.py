"""linformer 0.2.3 on our parts: the same constructors, `from linattn.compat.linformer import LinformerLM`, so that its
weights have a place to go. docs/compat.md has the differences."""

from linattn.compat.linformer import weights
from linattn.compat.linformer.linformer import Linformer, LinformerLM, LinformerSelfAttention
from linattn.compat.weights.loading import CONVERSIONS

CONVERSIONS.update(weights.CONVERSIONS)

__all__ = ["Linformer", "LinformerLM", "LinformerSelfAttention"]
