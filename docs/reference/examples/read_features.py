import torch

import linattn

q, (k, v) = torch.randn(1, 4, 5, 16), torch.randn(2, 1, 4, 1000, 16)
queries, keys = (linattn.Features(100 * x, function="exp") for x in (q, k))
state = linattn.summarize_features(keys, v)
# any number of queries, at a cost that does not depend on the thousand keys
print(linattn.read_features(queries, state).shape)  # torch.Size([1, 4, 5, 16])
