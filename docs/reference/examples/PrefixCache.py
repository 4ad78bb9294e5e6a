import torch

from linattn import LanguageModel, LanguageModelConfig, generate, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
cache = states.PrefixCache(model, every=1000)
book = torch.randint(257, (5000,)).tolist()
for question in ([1, 2, 3], [4, 5]):  # the book is read for the first question only
    state = cache.read(book + question[:-1])
    answer = generate(model, [question[-1:]], max_new_tokens=8, state=state)
print(len(cache))  # 7
