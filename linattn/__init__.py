"""Linear-complexity attention for PyTorch: every method around one operator."""

__version__ = "0.1.0"
