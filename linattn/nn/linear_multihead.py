"""The Linformer with torch's signature: `nn.MultiheadAttention` over projected keys and values.
Wang et al., https://arxiv.org/abs/2006.04768"""

from typing import Any, final

import torch

from linattn.attention.linformer import LearnedProjection, LinformerAttention, SequenceProjection
from linattn.nn.torch_multihead import TorchMultiheadAttention
from linattn.ops.names import unknown_name

PARAM_SHARING = ("none", "headwise", "key-value", "layerwise")


@final
class LinearMultiheadAttention(TorchMultiheadAttention):
    """`TorchMultiheadAttention` with learned projections of up to `seq_len` keys and values to `proj_k` (or to
    `seq_len`, if that is less).

    `param_sharing` is the paper's: "none" has an E and an F for each head, "headwise" one E and one F for all heads,
    "key-value" E = F, and "layerwise" takes that one E from `projection`, the same object in every layer:

        first = LinearMultiheadAttention(512, 8, seq_len=1024, param_sharing="layerwise")
        second = LinearMultiheadAttention(512, 8, param_sharing="layerwise", projection=first.projection)

    The weights that `need_weights` returns are the softmax over projected keys, (…, n, proj_k), linear in memory. Note
    that nn.TransformerEncoder copies its layer, the shared projection too: set `layer.self_attn` afterwards."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        seq_len: int = 512,
        proj_k: int = 128,
        param_sharing: str = "none",
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        projection: SequenceProjection | None = None,
        return_weights: bool = True,
    ):
        extra = int(add_bias_kv) + int(add_zero_attn)
        # the keys that add_bias_kv and add_zero_attn add have columns of their own, the first
        longest = seq_len + extra
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
            inner=_linformer(
                longest, min(proj_k, longest), num_heads, param_sharing, projection, (512 + extra, 128)
            ),
            return_weights=return_weights,
        )

    @property
    def projection(self) -> SequenceProjection:
        """That of the keys: with "key-value" and "layerwise", of the values too."""
        assert isinstance(self.inner, LinformerAttention)
        return self.inner.key_projection


def _linformer(
    max_length: int,
    projected: int,
    num_heads: int,
    sharing: str,
    projection: SequenceProjection | None,
    defaults: tuple[int, int],
) -> LinformerAttention:
    if sharing not in PARAM_SHARING:
        raise unknown_name("param_sharing", sharing, PARAM_SHARING)
    if projection is not None:
        if sharing != "layerwise":
            raise ValueError(f'projection is what layers share, with param_sharing="layerwise", but it is {sharing!r}')
        given = max_length, projected
        if given not in ((projection.max_length, projection.projected_length), defaults):
            shared = projection.extra_repr()
            raise ValueError(f"the shared projection is {shared}, but seq_len and proj_k ask for {given}")
        return LinformerAttention(projection)
    heads = num_heads if sharing == "none" else None
    first = LearnedProjection(max_length, projected, num_key_heads=heads)
    if sharing in ("key-value", "layerwise"):
        return LinformerAttention(first)
    return LinformerAttention(first, LearnedProjection(max_length, projected, num_key_heads=heads))
