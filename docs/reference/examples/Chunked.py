import torch

import linattn

feed_forward = linattn.FeedForward(32, 128)
x = torch.randn(2, 50, 32)
# the hidden units of a fifth of the tokens at a time
print(torch.allclose(linattn.Chunked(feed_forward, 5)(x), feed_forward(x), atol=1e-6))  # True
