import torch

import linattn

model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, depth=2, attention="elu")).eval()
_, state = model.extend(torch.randint(256, (1, 1000)))
_, later = model.extend(torch.randint(256, (1, 1000)), state)
sizes = []
for past in (state, later):
    linattn.map_state(lambda tensor: sizes.append(tensor.numel()), past)
print(type(state).__name__, sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :])  # TokenModelState True
