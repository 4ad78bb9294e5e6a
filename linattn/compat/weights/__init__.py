"""Checkpoints of the packages that this library replaces, loaded by one function. docs/compat.md, "Old weights"."""

from linattn.compat.weights.loading import load

__all__ = ["load"]
