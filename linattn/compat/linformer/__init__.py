"""The constructors of linformer 0.2.3, built from linattn's modules, into which its weights can be loaded.

docs/compat.md has the differences."""

from linattn.compat.linformer import weights
from linattn.compat.linformer.linformer import Linformer, LinformerLM, LinformerSelfAttention
from linattn.compat.weights.loading import CONVERSIONS

CONVERSIONS.update(weights.CONVERSIONS)

__all__ = ["Linformer", "LinformerLM", "LinformerSelfAttention"]
