"""The three modules of linformer 0.2.3. Wang et al., https://arxiv.org/abs/2006.04768"""

from typing import final

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linattn.attention.linformer import LearnedProjection, LinformerAttention
from linattn.compat.layers import make_feed_forward, make_stack
from linattn.models.sequence_model import SequenceModel
from linattn.nn import Branch, LearnedPositions, MultiheadAttention


@final
class LinformerSelfAttention(nn.Module):
    """Tokens, at most `seq_len`, attend to `k` projected ones; or to a context of at most `seq_len`.

    `one_kv_head` gives all heads the same keys and values; with `share_kv` values are keys."""

    def __init__(
        self,
        dim: int,
        seq_len: int,
        k: int = 256,
        heads: int = 8,
        dim_head: int | None = None,
        one_kv_head: bool = False,
        share_kv: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        keys = LearnedProjection(seq_len, k)
        self.attention = MultiheadAttention(
            dim,
            heads,
            LinformerAttention(keys, keys if share_kv else LearnedProjection(seq_len, k)),
            num_key_heads=1 if one_kv_head else None,
            head_dim=dim_head,
            out_bias=True,
            hidden_dropout=dropout,
        )
        if share_kv:
            self.attention.v_proj = self.attention.k_proj

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        context: Float[Tensor, "b m d"] | None = None,
        *,
        key_mask: Bool[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Attend. `key_mask` is True where a token is present: of the context if there is one, else of x."""
        return self.attention(x, context, key_mask=key_mask)


@final
class Linformer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), `depth` times; without positions, without a last norm."""

    def __init__(
        self,
        dim: int,
        seq_len: int,
        depth: int,
        k: int = 256,
        heads: int = 8,
        dim_head: int | None = None,
        one_kv_head: bool = False,
        share_kv: bool = False,
        reversible: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        pairs = []
        for _ in range(depth):
            layer = LinformerSelfAttention(dim, seq_len, k, heads, dim_head, one_kv_head, share_kv, dropout)
            parts = layer.attention, make_feed_forward(dim, dropout=dropout)
            pairs.append(tuple(Branch(part, norm=nn.LayerNorm(dim)) for part in parts))
        self.net = make_stack(pairs, reversible, "sum")

    def forward(
        self, x: Float[Tensor, "b n d"], *, key_mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Apply the layers. `key_mask` is True where a token is present."""
        return self.net(x, key_mask=key_mask)


@final
class LinformerLM(nn.Module):
    """Embeddings with learned positions, a `Linformer`, and the logits. Every token sees all others."""

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        seq_len: int,
        depth: int,
        k: int = 256,
        heads: int = 8,
        dim_head: int | None = None,
        one_kv_head: bool = False,
        share_kv: bool = False,
        reversible: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        linformer = Linformer(dim, seq_len, depth, k, heads, dim_head, one_kv_head, share_kv, reversible, dropout)
        self.model = SequenceModel(
            nn.Embedding(num_tokens, dim),
            linformer.net,
            # as large as the embeddings that they are added to
            positions=LearnedPositions(seq_len, dim, std=1.0),
            head=nn.Linear(dim, num_tokens),
        )

    def forward(self, x: Int[Tensor, "b n"], *, key_mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n v"]:
        """Return the logits of each token. `key_mask` is True where a token is present."""
        return self.model(x, key_mask=key_mask)
