import linattn

model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, depth=1)).eval()
# one step at a time: a token for each prompt, None once its row has ended
steps = linattn.stream(model, [[1, 2, 3], [4]], max_new_tokens=3)
first = next(steps)
print(len(first), len(list(steps)))  # 2 2
