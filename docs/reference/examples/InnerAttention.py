import torch

import linattn


class MeanAttention(linattn.InnerAttention):
    """y_i = the mean of all values."""

    causal = False

    def _attend(self, q, k, v, key_mask):
        if key_mask is not None:
            v = v.masked_fill(~key_mask.unsqueeze(-1), 0) * (v.shape[-2] / key_mask.sum(-1)[..., None, None])
        return v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1)


layer = linattn.MultiheadAttention(64, 4, MeanAttention())
print(layer(torch.randn(2, 100, 64)).shape)  # torch.Size([2, 100, 64])
