from linattn.integrations.transformers import LinattnConfig

config = LinattnConfig(language_model={"vocab_size": 257, "dim": 32, "depth": 2, "attention": "elu"})
print(config.hidden_size, config.num_hidden_layers)  # 32 2
