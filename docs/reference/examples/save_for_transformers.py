from pathlib import Path

from transformers import pipeline

import linattn
from linattn.integrations.transformers import byte_tokenizer, save_for_transformers

model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=257, dim=32, depth=1))
model.save("model")
save_for_transformers(byte_tokenizer(), Path("model"))
text = pipeline("text-generation", "model", trust_remote_code=True)("to be", max_new_tokens=3)[0]["generated_text"]
print(text[:5])  # to be
