import linattn

config = linattn.LanguageModelConfig(
    vocab_size=256, dim=64, depth=3, attention=("convolution:3", "local+elu", "softmax"), convolution=4
)
print(linattn.LanguageModelConfig.from_dict(config.to_dict()) == config)  # True
