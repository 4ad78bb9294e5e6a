"""The forms for any device: in chunks for training and prefill, one for short sequences, one for a single token."""
