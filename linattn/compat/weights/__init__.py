"""`load` takes checkpoints of the packages that this library replaces. docs/compat.md, "Old weights"."""

from linattn.compat.weights.loading import load

__all__ = ["load"]
