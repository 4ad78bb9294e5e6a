"""The version of the package, below all layers: saved models hold it."""

__version__ = "0.1.0"
