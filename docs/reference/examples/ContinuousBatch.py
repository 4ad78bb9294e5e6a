from linattn import ContinuousBatch, LanguageModel, LanguageModelConfig, Request

model = LanguageModel(LanguageModelConfig(vocab_size=256, dim=32, depth=1)).eval()
batch = ContinuousBatch(model, size=2)
first = batch.add(Request([1, 2, 3], max_new_tokens=4))
batch.step()
# requests join while others are generated, wait if no row is free, and may be cancelled
second, third = (batch.add(Request([4], max_new_tokens=4)) for _ in range(2))
batch.cancel(second)
texts = {first: 1, third: 0}
while batch:
    for new in batch.step():
        texts[new.request] += 1
print(texts)  # {0: 4, 2: 4}
