import torch

import linattn

q, (k, v) = torch.randn(1, 4, 5, 16), torch.randn(2, 1, 4, 1000, 16)
state = linattn.summarize(k, v, feature_map="softplus")
# any number of queries, at a cost that does not depend on the thousand keys
print(linattn.read(q, state, feature_map="softplus").shape)  # torch.Size([1, 4, 5, 16])
