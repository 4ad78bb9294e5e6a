import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
near = linattn.compare_with_softmax(q, k, linattn.SecondOrderTaylorFeatureMap(), v=v)
far = linattn.compare_with_softmax(q, k, linattn.ElementwiseFeatureMap("elu_plus_one"), v=v)
print(bool((near.output_error < far.output_error).all()))  # True
