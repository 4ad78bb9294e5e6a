from transformers import LlamaConfig, LlamaForCausalLM

from linattn.linearize import LayerPlan, plan

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
layer: LayerPlan = plan(model, method="elu").layers[0]
print(layer.name, layer.cache_numbers)  # model.layers.0.self_attn 64
