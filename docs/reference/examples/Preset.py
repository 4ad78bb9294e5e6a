import linattn

preset: linattn.Preset = linattn.PRESETS["gla"]
print(preset.paper)  # Gated Linear Attention
print(preset.fields(dim=64, depth=2, num_heads=4)["key_dim"])  # 8
