from linattn import LanguageModel, LanguageModelConfig, Request, Sampling, generate_each

model = LanguageModel(LanguageModelConfig(vocab_size=256, dim=32, depth=1)).eval()
# each with its own length, sampling, seed and stop tokens
requests = [
    Request([1, 2, 3], max_new_tokens=9),
    Request([4], max_new_tokens=3, sampling=Sampling(temperature=1.0), seed=1, stop_tokens=range(256)),
]
print([(number, len(tokens)) for number, tokens in generate_each(model, requests)])  # [(1, 1), (0, 9)]
