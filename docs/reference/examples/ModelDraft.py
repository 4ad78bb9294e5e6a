from linattn import LanguageModel, LanguageModelConfig, ModelDraft, generate

sizes = {"vocab_size": 257, "depth": 2, "num_heads": 2, "attention": "elu"}
small, large = (LanguageModel(LanguageModelConfig(dim=dim, **sizes)) for dim in (16, 64))
new = generate(large, [[1, 2, 3]], max_new_tokens=20, draft=ModelDraft(small))
print(new == generate(large, [[1, 2, 3]], max_new_tokens=20))  # True
