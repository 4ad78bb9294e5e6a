import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
found = linattn.compare_with_softmax(q, k, linattn.TaylorFeatureMap(), v=v)
# per head: the error of the output, and that of attending to all keys alike, which knows nothing
print(type(found) is linattn.SoftmaxComparison, found.output_error.shape)  # True torch.Size([4])
