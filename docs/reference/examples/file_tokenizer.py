from tokenizers import Tokenizer, models, pre_tokenizers

from linattn.integrations.transformers import file_tokenizer

words = Tokenizer(models.WordLevel({"to": 0, "be": 1, "or": 2, "?": 3}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.save("words.json")
print(file_tokenizer("words.json")("to be").input_ids)  # [4, 0, 1]
