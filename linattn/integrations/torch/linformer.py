"""The Linformer with torch's signature: `nn.MultiheadAttention` over projected keys and values.
Wang et al., https://arxiv.org/abs/2006.04768"""

from typing import Any, final

import torch

from linattn.attention.linformer import LearnedProjection, LinformerAttention, SequenceProjection
from linattn.checks import check_sizes, check_types
from linattn.integrations.torch.multihead import TorchMultiheadAttention
from linattn.names import unknown_name

PARAM_SHARING = ("none", "headwise", "key-value", "layerwise")


@final
class LinearMultiheadAttention(TorchMultiheadAttention):
    """`TorchMultiheadAttention` with learned projections of up to `seq_len` keys and values to `proj_k` (at most
    `seq_len`). See `TorchMultiheadAttention` for the parameters that are torch's, and `return_weights`.

    `param_sharing` is the paper's: "none" has an E and an F for each head, "headwise" one E and one F for all heads,
    "key-value" E = F, and "layerwise" takes that one E from `projection`, the same object in every layer:

        first = LinearMultiheadAttention(512, 8, seq_len=1024, param_sharing="layerwise")
        second = LinearMultiheadAttention(512, 8, param_sharing="layerwise", projection=first.projection)

    The weights that `need_weights` returns are the softmax over projected keys, (…, n, proj_k), linear in memory.
    nn.TransformerEncoder copies its layer together with the shared projection: set `layer.self_attn` afterwards."""

    @check_types
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
        check_sizes(num_heads=num_heads, seq_len=seq_len, proj_k=proj_k)
        # the keys that add_bias_kv and add_zero_attn add come first and have columns of their own
        longest = seq_len + int(add_bias_kv) + int(add_zero_attn)
        _check_sizes(projection, seq_len, longest, proj_k)
        inner = _linformer(longest, min(proj_k, longest), num_heads, param_sharing, projection)
        options = (embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first)
        super().__init__(*options, device, dtype, inner=inner, return_weights=return_weights)

    @property
    def projection(self) -> SequenceProjection:
        """The projection of the keys; with "key-value" and "layerwise" also that of the values."""
        assert isinstance(self.inner, LinformerAttention)
        return self.inner.key_projection


def _check_sizes(projection: SequenceProjection | None, seq_len: int, longest: int, proj_k: int) -> None:
    """Raise ValueError if a `projection` is of another class, or if beside it `seq_len` or `proj_k` is neither the
    default nor its own: it would have no effect. `longest` is `seq_len` and the number of keys that options add."""
    if projection is None:
        return
    if not isinstance(projection, SequenceProjection):
        raise ValueError(
            "projection must be a SequenceProjection, such as that of another layer, layer.projection, but is a "
            f"{type(projection).__name__}"
        )
    made_for = projection.max_length - (longest - seq_len)
    for name, given, default, actual in (
        ("seq_len", seq_len, 512, made_for),
        ("proj_k", proj_k, 128, projection.projected_length),
    ):
        if given not in (default, actual):
            raise ValueError(f"{name} is {given}, but the projection that was given has {actual}: leave it out")


def _linformer(
    max_length: int, projected: int, num_heads: int, sharing: str, projection: SequenceProjection | None
) -> LinformerAttention:
    if sharing not in PARAM_SHARING:
        raise unknown_name("param_sharing", sharing, PARAM_SHARING)
    if projection is not None and sharing != "layerwise":
        raise ValueError(f'projection needs param_sharing="layerwise", but param_sharing is {sharing!r}')
    heads = num_heads if sharing == "none" else None
    of_keys = LearnedProjection(max_length, projected, num_key_heads=heads) if projection is None else projection
    if sharing in ("key-value", "layerwise"):
        return LinformerAttention(of_keys)
    return LinformerAttention(of_keys, LearnedProjection(max_length, projected, num_key_heads=heads))
