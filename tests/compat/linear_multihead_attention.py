"""Rows for constructors.py: the Linformer drop-in, of a sequence with itself and with a context, in every sharing."""

from typing import Any

from torch import Tensor

from linattn.compat.linear_multihead_attention import LinearMultiheadAttention

SHARINGS = ("none", "headwise", "key-value", "layerwise")


def rows(dim: int, longest: int) -> list[dict[str, Any]]:
    """Masks are True here where a token is present, as in the other packages; torch's are True where one is hidden."""
    return [_row(dim, longest, sharing, crossed) for sharing in SHARINGS for crossed in (False, True)]


def _row(dim: int, longest: int, sharing: str, crossed: bool) -> dict[str, Any]:
    def build() -> LinearMultiheadAttention:
        return LinearMultiheadAttention(
            dim, 4, seq_len=longest, proj_k=8, param_sharing=sharing, batch_first=True, add_bias_kv=crossed
        )

    def call(
        model: LinearMultiheadAttention,
        x: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        keys, present = (x, mask) if context is None else (context, context_mask)
        return model(x, keys, keys, key_padding_mask=None if present is None else ~present, need_weights=False)[0]

    name = f"LinearMultiheadAttention: {sharing}{', of a context' if crossed else ''}"
    return {
        "name": name,
        "build": build,
        "call": call,
        "takes_tokens": False,
        "takes_context": crossed,
        "arguments": lambda x: (x, x, x),
    }
