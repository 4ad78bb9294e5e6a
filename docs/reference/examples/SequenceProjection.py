import torch

import linattn


class EveryFourth(linattn.SequenceProjection):
    """Keeps each fourth key and value."""

    def forward(self, x, *, key_mask=None):
        return x[:, :, ::4], None if key_mask is None else key_mask[..., ::4]


attention = linattn.LinformerAttention(EveryFourth(max_length=100, projected_length=25))
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
