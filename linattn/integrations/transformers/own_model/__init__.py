"""Our language model for transformers: configuration, models with heads, cache, tokenizers, and targets of adapters."""
