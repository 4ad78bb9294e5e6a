from linattn import LanguageModel, LanguageModelConfig, PromptLookup, generate

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
draft = PromptLookup()
new = generate(model, [prompt], max_new_tokens=50, draft=draft)
print(new == generate(model, [prompt], max_new_tokens=50))  # True
print(0 <= draft.accepted <= draft.drafted)  # True
