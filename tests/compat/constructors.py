"""Small models of every constructor that we replace, with every kind of option: what the laws in test_laws.py are
stated over. A package adds its rows here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from linattn.compat.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)
from tests.compat import linear_multihead_attention
from tests.compat.performer_pytorch import constructors as performer_pytorch

VOCABULARY, DIM, LONGEST = 11, 16, 64


class Constructor(NamedTuple):
    """A model, and how it is called: `call(model, x, mask, context, context_mask)`, True where a token is present, and
    if it is causal `extend(model, x, state, mask, context, context_mask)`."""

    name: str
    build: Callable[[], nn.Module]
    call: Callable[..., Tensor]
    extend: Callable[..., tuple[Tensor, Any]] | None = None
    takes_tokens: bool = True
    takes_context: bool = False
    arguments: Callable[[Tensor], tuple[Tensor, ...]] = lambda x: (x,)

    @property
    def causal(self) -> bool:
        return self.extend is not None

    def inputs(self, b: int, n: int) -> Tensor:
        return torch.randint(VOCABULARY, (b, n)) if self.takes_tokens else torch.randn(b, n, DIM, dtype=torch.float64)

    def context(self, b: int, m: int = 9) -> dict[str, Tensor]:
        """What call and extend take beside x and its mask."""
        if not self.takes_context:
            return {}
        return {
            "context": torch.randn(b, m, DIM, dtype=torch.float64),
            "context_mask": torch.rand(b, m).argsort(1) < m - 3,
        }


def has_window(options: dict[str, Any], *, lm: bool) -> bool:
    """Whether linear-attention-transformer's `local_attn_window_size` has an effect: else it is refused."""
    axial_positions = lm and options.get("use_axial_pos_emb", True) and not options.get("use_rotary_emb")
    local_heads = options.get("n_local_attn_heads", 0) not in (0, (0,))
    return axial_positions or local_heads or options.get("attend_axially", False)


def _linear_attention_transformer(
    name: str, *, lm: bool = True, causal: bool = False, receives_context: bool = False, **options: Any
) -> Constructor:
    def build() -> nn.Module:
        fields = {"dim": DIM, "depth": 2, "max_seq_len": LONGEST, "heads": 4, "dim_head": 6}
        fields |= {"causal": causal, "receives_context": receives_context} | options
        fields |= {"local_attn_window_size": 8} if has_window(fields, lm=lm) else {}
        if lm:
            return LinearAttentionTransformerLM(num_tokens=VOCABULARY, **fields)
        return LinearAttentionTransformer(**fields)

    def call(model: Any, x: Tensor, mask: Tensor | None = None, **context: Tensor) -> Tensor:
        return model(x, input_mask=mask, **context)

    def extend(model: Any, x: Tensor, state: Any, mask: Tensor | None = None, **context: Tensor) -> Any:
        return model.extend(x, state, input_mask=mask, **context)

    kind = "LinearAttentionTransformerLM" if lm else "LinearAttentionTransformer"
    return Constructor(f"{kind}: {name}", build, call, extend if causal else None, lm, receives_context)


def _of_linear_attention_transformer() -> list[Constructor]:
    row = _linear_attention_transformer
    readme = {
        "emb_dim": 10,
        "blindspot_size": 4,
        "n_local_attn_heads": 2,
        "reversible": True,
        "ff_chunks": 2,
        "ff_glu": True,
        "shift_tokens": True,
    }
    return [
        row("plain"),
        row("plain causal", causal=True),
        row("the readme's", causal=True, **readme),
        row("the readme's, not reversible", causal=True, **(readme | {"reversible": False})),
        row("local heads, one a layer", n_local_attn_heads=(1, 4)),
        row("shifted, gated, factorised", shift_tokens=True, ff_glu=True, emb_dim=10, n_local_attn_heads=2),
        row("reversible", reversible=True, ff_chunks=3),
        row("axial", attend_axially=True, n_local_attn_heads=1),
        row("axial causal", attend_axially=True, causal=True, reversible=True),
        row("encoder", return_embeddings=True, n_local_attn_heads=2, reversible=True),
        row("factorised encoder", return_embeddings=True, emb_dim=10),
        row("decoder", causal=True, receives_context=True, n_local_attn_heads=2, reversible=True),
        row("decoder, not reversible", causal=True, receives_context=True, shift_tokens=True),
        row("Linformer", linformer_settings=LinformerSettings(k=8), n_local_attn_heads=1),
        row(
            "Linformer context",
            causal=True,
            receives_context=True,
            context_linformer_settings=LinformerContextSettings(seq_len=20, k=5),
        ),
        row("rotary", use_rotary_emb=True, n_local_attn_heads=2),
        row("rotary causal", use_rotary_emb=True, n_local_attn_heads=2, causal=True),
        row("learned positions", use_axial_pos_emb=False, causal=True),
        row("stack", lm=False, n_local_attn_heads=2),
        row("stack causal", lm=False, causal=True, n_local_attn_heads=2, blindspot_size=8, shift_tokens=True),
        row("stack reversible", lm=False, reversible=True, attend_axially=True, receives_context=True),
    ]


CONSTRUCTORS: list[Constructor] = [
    *_of_linear_attention_transformer(),
    *(Constructor(**row) for row in performer_pytorch.rows(VOCABULARY, DIM, LONGEST)),
    *(Constructor(**row) for row in linear_multihead_attention.rows(DIM, LONGEST)),
]


def _over(rows: list[Constructor]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])


every_constructor = _over(CONSTRUCTORS)
every_causal_constructor = _over([row for row in CONSTRUCTORS if row.causal])
