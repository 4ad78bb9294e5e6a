"""A detector in the shape of DETR: an encoder over the tokens of an image, and a decoder that asks it, with learned
queries, for objects. Any `nn.MultiheadAttention` goes into its layers. Carion et al., https://arxiv.org/abs/2005.12872"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from examples.detr.backbone import Backbone, positions

# makes the attention for a number of keys
Attention = Callable[[int], nn.MultiheadAttention]


class EncoderLayer(nn.Module):
    def __init__(self, self_attn: nn.MultiheadAttention, hidden: int):
        super().__init__()
        dim = self_attn.embed_dim
        self.self_attn = self_attn
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, place: Tensor, padding: Tensor) -> Tensor:
        q = x + place
        y, _ = self.self_attn(q, q, x, key_padding_mask=padding, need_weights=False)
        x = self.norm1(x + y)
        return self.norm2(x + self.feed_forward(x))


class DecoderLayer(nn.Module):
    def __init__(self, self_attn: nn.MultiheadAttention, multihead_attn: nn.MultiheadAttention, hidden: int):
        super().__init__()
        dim = self_attn.embed_dim
        self.self_attn, self.multihead_attn = self_attn, multihead_attn
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x: Tensor, query: Tensor, memory: Tensor, place: Tensor, padding: Tensor) -> Tensor:
        q = x + query
        x = self.norm1(x + self.self_attn(q, q, x, need_weights=False)[0])
        asked = self.multihead_attn(x + query, memory + place, memory, key_padding_mask=padding, need_weights=False)[0]
        x = self.norm2(x + asked)
        return self.norm3(x + self.feed_forward(x))


class Detector(nn.Module):
    """For each of `num_queries`, which class (the last one: nothing), and the box, (x, y, width, height), as shares of
    the image. `longest` is the number of tokens that the largest image has; an image of h × w has ⌈h/8⌉ · ⌈w/8⌉."""

    def __init__(
        self,
        attention: Attention,
        *,
        longest: int,
        channels: int = 3,
        num_classes: int = 10,
        num_queries: int = 20,
        depth: int = 2,
    ):
        super().__init__()
        dim = attention(1).embed_dim
        hidden = 4 * dim
        self.backbone = Backbone(channels, dim)
        self.query = nn.Parameter(torch.randn(num_queries, dim))
        self.encoder = nn.ModuleList(EncoderLayer(attention(longest), hidden) for _ in range(depth))
        self.decoder = nn.ModuleList(
            DecoderLayer(attention(num_queries), attention(longest), hidden) for _ in range(depth)
        )
        self.classes, self.boxes = nn.Linear(dim, num_classes + 1), nn.Linear(dim, 4)

    def forward(
        self, images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b h w"]
    ) -> tuple[Float[Tensor, "b q k"], Float[Tensor, "b q 4"]]:
        features, mask = self.backbone(images, mask)
        x, padding = features.flatten(2).mT, ~mask.flatten(1)
        place = positions(mask, x.shape[-1]).to(x.dtype)
        for layer in self.encoder:
            x = layer(x, place, padding)
        query = self.query.expand(len(x), -1, -1)
        y = torch.zeros_like(query)
        for layer in self.decoder:
            y = layer(y, query, x, place, padding)
        return self.classes(y), F.sigmoid(self.boxes(y))
