from linattn.integrations.transformers import byte_tokenizer

tokenizer = byte_tokenizer()
tokens = tokenizer("Grüße").input_ids
print(tokens[0], len(tokens), tokenizer.decode(tokens, skip_special_tokens=True))  # 256 8 Grüße
