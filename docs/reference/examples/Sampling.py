import linattn

model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, depth=1)).eval()
sampling = linattn.Sampling(temperature=0.8, top_p=0.9)
first, again = (linattn.generate(model, [[1, 2, 3]], max_new_tokens=8, sampling=sampling, seed=0) for _ in range(2))
print(first == again)  # True
