import linattn

print([*linattn.PRESETS][:3])  # ['transformer', 'performer', 'retnet']

config = linattn.LanguageModelConfig.preset("kimi_linear", vocab_size=256, dim=64)
print(config.layers)  # ('kda', 'kda', 'kda', 'softmax')
