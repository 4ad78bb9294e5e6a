import linattn

model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, depth=1)).eval()
# prompts of different lengths; each row is what follows its prompt
rows = linattn.generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
print([len(row) for row in rows])  # [5, 5]
