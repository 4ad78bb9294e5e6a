from transformers import AttentionInterface

from linattn.integrations.transformers import register_attention

print(register_attention("local:3+elu:1"))  # linattn:local:3+elu:1
print("linattn:local:3+elu:1" in AttentionInterface())  # True
