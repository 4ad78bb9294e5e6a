from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
cache = states.PrefixCache(model, every=10)
cache.read(list(range(25)))
found = cache.find([*range(22), 99])
print(type(found) is states.Prefix, found.num_tokens)  # True 20
