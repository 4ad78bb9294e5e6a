import linattn

facts: linattn.Traits = linattn.traits("linformer")
print(facts.causal, facts.learned, facts.fixed_length)  # False True True
# a mixture can do what all its parts can, and needs what any of them needs
print(linattn.traits("local+gated_delta").bidirectional, linattn.traits("local+gated_delta").gated)  # False True
gated = [name for name in linattn.ATTENTIONS if linattn.traits(name).gated]
print(gated)  # ['gla', 'ssd', 'delta', 'gated_delta', 'kda', 'rwkv7']
