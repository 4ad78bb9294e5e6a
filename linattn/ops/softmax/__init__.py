"""Softmax attention over all keys or in a window: the baseline, and a part of mixtures and hybrids."""
