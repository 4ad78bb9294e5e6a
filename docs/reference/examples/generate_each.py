from linattn import LanguageModel, LanguageModelConfig, Request, generate, generate_each

model = LanguageModel(LanguageModelConfig(vocab_size=256, dim=32, depth=1)).eval()
prompts = [[1, 2, 3], [4], [5, 6]]
# two at a time; each text comes when it ends
requests = (Request(prompt, max_new_tokens=5) for prompt in prompts)
texts = dict(generate_each(model, requests, size=2))
print(texts[1] == generate(model, [[4]], max_new_tokens=5)[0])  # True
