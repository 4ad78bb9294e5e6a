from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import make_teacher

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
teacher = make_teacher(model)
print(any(weight.requires_grad for weight in teacher.parameters()))  # False
