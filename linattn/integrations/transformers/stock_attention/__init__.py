"""Our attention in transformers' stock models, as `attn_implementation="linattn:elu"` and so on."""
