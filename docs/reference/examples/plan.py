from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import Plan, plan

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
planned: Plan = plan(model, method="elu", keep=[0])
print([layer.reason for layer in planned.layers])  # ['kept', None]
