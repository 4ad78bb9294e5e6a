"""The three modules of linformer 0.2.3. Wang et al., https://arxiv.org/abs/2006.04768"""

from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from linattn.attention import LearnedProjection, LinformerAttention
from linattn.compat.layers import LayerOptions, make_pair, make_stack
from linattn.compat.options import REQUIRED, takes
from linattn.models.token_model import TokenModel
from linattn.nn import LearnedPositions, MultiheadAttention
from linattn.types import Context, ContextMask, TokenIds, TokenMask, Tokens


@dataclass(frozen=True, kw_only=True)
class LinformerOptions(LayerOptions):
    """The package's options. `one_kv_head`: all heads have the same keys and values; `share_kv`: values are keys."""

    seq_len: int = REQUIRED
    k: int = 256
    one_kv_head: bool = False
    share_kv: bool = False
    dropout: float = 0.0


_STACK = "dim seq_len depth k heads dim_head one_kv_head share_kv reversible dropout"


@final
class LinformerSelfAttention(nn.Module):
    """Tokens attend to each other or to a context, at most `seq_len` tokens, projected to `k` keys and values."""

    @takes(LinformerOptions, "dim seq_len k heads dim_head one_kv_head share_kv dropout")
    def __init__(self, options: LinformerOptions):
        super().__init__()
        keys = LearnedProjection(options.seq_len, options.k)
        values = keys if options.share_kv else LearnedProjection(options.seq_len, options.k)
        self.attention = MultiheadAttention(
            options.dim,
            options.heads,
            LinformerAttention(keys, values),
            num_key_heads=1 if options.one_kv_head else None,
            head_dim=options.dim_head,
            out_bias=True,
            hidden_dropout=options.dropout,
        )
        if options.share_kv:
            self.attention.v_proj = self.attention.k_proj

    def forward(self, x: Tokens, context: Context = None, *, key_mask: ContextMask = None) -> Tokens:
        """Attend. `key_mask` is True where a token is present: of the context if there is one, else of x."""
        return self.attention(x, context, key_mask=key_mask)


@final
class Linformer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), `depth` times; without positions, without a last norm."""

    @takes(LinformerOptions, _STACK)
    def __init__(self, options: LinformerOptions):
        super().__init__()
        layers = (LinformerSelfAttention(options).attention for _ in range(options.depth))
        pairs = (make_pair(replace(options, ff_dropout=options.dropout), layer) for layer in layers)
        self.net = make_stack(options, pairs, "sum")

    def forward(self, x: Tokens, *, key_mask: TokenMask = None) -> Tokens:
        """Apply the layers. `key_mask` is True where a token is present."""
        return self.net(x, key_mask=key_mask)


@final
class LinformerLM(TokenModel):
    """Embeddings with learned positions, a `Linformer`, and the logits. Every token sees all others."""

    causal, tied = False, False

    @takes(LinformerOptions, f"num_tokens {_STACK}")
    def __init__(self, options: LinformerOptions):
        super().__init__()
        self.linformer = Linformer(options)
        self.embedding = nn.Embedding(options.num_tokens, options.dim)
        # as large as the embeddings that they are added to
        self.positions = LearnedPositions(options.seq_len, options.dim, std=1.0)
        self.dropout, self.norm = nn.Identity(), nn.Identity()
        self.head = nn.Linear(options.dim, options.num_tokens)

    def get_stack(self) -> nn.Module:
        return self.linformer.net

    def forward(self, x: TokenIds, *, key_mask: TokenMask = None) -> Float[Tensor, "b n v"]:
        """Return the logits of each token. `key_mask` is True where a token is present."""
        return self.logits(self.hidden(x, key_mask=key_mask))
