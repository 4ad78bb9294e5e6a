from linattn import ContinuousBatch, LanguageModel, LanguageModelConfig, NewToken, Request

batch = ContinuousBatch(LanguageModel(LanguageModelConfig(vocab_size=256, dim=32, depth=1)))
number = batch.add(Request([1, 2, 3], max_new_tokens=2))
(first,), (second,) = batch.step(), batch.step()
print(second == NewToken(number, second.token, last=True), first.last)  # True False
